package canary

import "github.com/canaryd/canaryd/pkg/rules"

// gone tells which of the chains that are missing in a table without its mark are
// lost, and which their owner has removed since.
//
// A flush that leaves chains standing takes none away; who finds a chain missing
// after it knows that its owner was there. Not so if the chain was missing before:
// saved rules that lack it, restored and then flushed, leave just the same behind.
// So what was lost at an earlier read of the same loss is lost until it stands again.
func gone(v Verdict, want rules.Section, missing []string, before Finding) (lost, released []string) {
	if v != Emptied {
		return missing, nil
	}
	was := make(map[string]bool, len(before.Missing))
	for _, name := range before.Missing {
		was[name] = true
	}
	for _, name := range missing {
		if was[name] {
			lost = append(lost, name)
		} else {
			released = append(released, name)
		}
	}
	if 2*len(released) > len(want.Chains) {
		return missing, nil // no owner removes that many
	}
	return lost, released
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
	wanted := make(map[string]bool, len(want.Chains))
	for _, c := range want.Chains {
		wanted[c.Name] = true
	}
	for _, c := range seen.Section.Chains {
		if !wanted[c.Name] {
			list = append(list, c.Name)
		}
	}
	return list
}
