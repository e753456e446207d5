package rules

// OthersGone counts the rules that before holds and now does not, without protected rules and
// marks. A nil table does not exist.
func (p Protection) OthersGone(before, now *Table, mark func(Rule) bool) int {
	if before == nil {
		return 0
	}
	gone := 0
	for _, c := range before.Chains {
		builtin := Builtin(before.Name, c.Name)
		if !builtin && p.Chain(c.Name) {
			continue
		}
		left := map[string]int{}
		for _, r := range now.Chain(c.Name).others(p, builtin, before.Name, mark) {
			left[r.Spec]++
		}
		for _, r := range c.others(p, builtin, before.Name, mark) {
			if left[r.Spec]--; left[r.Spec] < 0 {
				gone++
			}
		}
	}
	return gone
}

// others returns the rules of a chain that are neither marks nor protected themselves.
func (c *Chain) others(p Protection, builtin bool, t TableName, mark func(Rule) bool) (list []Rule) {
	if c == nil {
		return nil
	}
	for _, r := range c.Rules {
		switch {
		case mark(r):
		case builtin && (p.Chain(r.Target) || p.Rule != nil && p.Rule(t, c.Name, r)):
		default:
			list = append(list, r)
		}
	}
	return list
}
