package canary

import "github.com/canaryd/canaryd/pkg/rules"

// This file covers a saved file that is restored and then flushed. Another process runs
// `iptables-restore < saved` and then `iptables -F`, before canaryd has replaced the saved
// rules. The flush leaves the empty chains of the saved file behind, not the present ones.
//
// Without this file, Judge would see the flush alone, and treat a missing chain as removed by
// its owner. That is right for the host port of a pod that ended during the outage. It is wrong
// for a host port that is younger than the saved file. CNI plugins write once, so the port
// would be unreachable as long as its pod lives. And chains that only the file had would
// remain. Then TestASavedFileIsFlushedBeforeItIsReplaced and
// TestSavedRulesAreFlushedInTheMiddleOfAReplay fail on both backends.
// TestSavedFilesThatAreFlushed fails with 2 of 5 seeds on each path of nft.
//
// So each Finding of a loss keeps Restored, Lacked and Brought, which later reads cannot show,
// and the next read gets it as Seen.Before. reload.Memory keeps it. The daemon reads a table as
// soon as it sees that a file replaced it (internal/daemon/savedfile.go).

// remember adds the evidence of earlier Findings of the loss to the Finding of a table without
// its mark. Judge calls it: one read cannot show which chains were missing before.
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

// lacked returns the missing chains that are certainly lost, in a table without its mark.
//
// A flush that leaves chains in the table deletes none, so a chain that is missing afterwards
// was removed by its owner. That is wrong if the chain was missing before: saved rules without
// it, restored and then flushed, leave the same traces. So the chains that are missing in the
// first read, of saved rules or of a table without chains, are lost until they exist again.
// Chains that are missing only later were removed by their owner.
func lacked(v Verdict, restored string, missing []string, before Finding) []string {
	if v != Emptied && (v != Replaced || restored != before.Restored) {
		return missing
	}
	list, _ := divide(missing, before.Lacked)
	return list
}

// divide splits names into the names that are listed, and the others, in their order.
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

// split divides the missing chains, in a table whose chains a flush left, into lost chains and
// chains that their owner has removed. remember calls it. A replay writes only the lost ones.
func (f *Finding) split(want rules.Section) {
	_, released := divide(f.Missing, f.Lacked)
	// Without a chain that protected rules lead to, these rules would let in packets that it
	// kept out. So it is put back, even if its owner deleted it after the flush.
	released = want.NotLedTo(released)
	if 2*len(released) > len(want.Chains)-len(want.LedTo) { // no owner removes so many
		f.Lacked = f.Missing
		return
	}
	_, f.Missing = divide(f.Missing, released)
	f.Released = released
}

// brought returns the protected chains that are not wanted and that saved rules brought back,
// as long as they are empty. A flush leaves them behind. A replay deletes them.
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
	_, list = divide(seen.Section.NotLedTo(rules.ChainNames(seen.Section.Chains)), rules.ChainNames(want.Chains))
	return list
}
