package canary

import "github.com/canaryd/canaryd/pkg/rules"

// The saved file that is flushed before it is replaced: another process restores a file that was
// saved a while ago, and flushes the table before canaryd has replaced the file's rules
// (`iptables-restore < saved`, then `iptables -F`, within --settle or one replay). The flush leaves
// empty chains behind: those that the file had, not those of the present.
//
// Without this file, Judge would see the flush alone. A chain that is missing then was removed by
// its owner. That is right for the host port of a pod that went during the outage, and wrong for
// one that is younger than the file: CNI plugins write once, so it would stay unreachable for as
// long as its pod lives. Chains of pods that are gone, which only the file had, would stay.
// TestASavedFileIsFlushedBeforeItIsReplaced and TestSavedRulesAreFlushedInTheMiddleOfAReplay fail
// so, on both backends, and of 5 random seeds of TestSavedFilesThatAreFlushed 2 on each path of nft.
//
// So each Finding of a loss remembers what later reads cannot show, and the next read gets it as
// Seen.Before: Restored, Lacked and Brought. reload.Memory hands it on; the daemon reads a table
// as soon as it sees that a file replaced it (internal/daemon/savedfile.go).

// remember completes what is found of a table without its mark by what was found before.
func (f *Finding) remember(want Wanted, seen Seen) {
	f.Restored = seen.Before.Restored
	if f.Verdict == Replaced {
		f.Restored = seen.Table.Chain(want.CanaryChain).Rules[0].Spec
	}
	f.Lacked = lacked(f.Verdict, f.Restored, f.Missing, seen.Before)
	if f.Verdict == Emptied {
		f.split(want.Section)
	}
	f.Brought = brought(f.Verdict, want.Section, seen)
}

// lacked returns which of the chains that are missing in a table without its mark
// are lost for sure. A flush that leaves chains standing takes none away; who finds a
// chain missing after it knows that its owner was there. Not so if it was missing
// before: saved rules that lack it, restored and then flushed, leave just the same
// behind. So what the first read of such rules, or of a table without chains, missed is
// lost until it stands again; what is missed later was removed by its owner.
func lacked(v Verdict, restored string, missing []string, before Finding) []string {
	if v != Emptied && (v != Replaced || restored != before.Restored) {
		return missing
	}
	list, _ := divide(missing, before.Lacked)
	return list
}

// divide returns which of the names are listed, and the others.
func divide(names, listed []string) (in, out []string) {
	is := make(map[string]bool, len(listed))
	for _, name := range listed {
		is[name] = true
	}
	for _, name := range names {
		if is[name] {
			in = append(in, name)
		} else {
			out = append(out, name)
		}
	}
	return in, out
}

// split tells the missing chains that are lost from those that their owner has
// removed, in a table of which a flush left the chains.
func (f *Finding) split(want rules.Section) {
	_, released := divide(f.Missing, f.Lacked)
	if 2*len(released) > len(want.Chains) { // no owner removes that many
		f.Lacked = f.Missing
		return
	}
	f.Missing, f.Released = f.Lacked, released
}

// brought returns the protected chains that nobody wants and that saved rules have
// brought back, while no one fills them. A flush leaves them behind empty.
func brought(v Verdict, want rules.Section, seen Seen) []string {
	var list []string
	if v != Replaced {
		for _, name := range seen.Before.Brought {
			if c := seen.Table.Chain(name); c != nil && len(c.Rules) == 0 {
				list = append(list, name)
			}
		}
		return list
	}
	_, list = divide(names(seen.Section.Chains), names(want.Chains))
	return list
}
