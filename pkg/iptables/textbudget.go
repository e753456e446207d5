package iptables

import "github.com/canaryd/canaryd/pkg/rules"

// A lineCount leaves chains out while the text of a family is parsed. Where the kernel's bytes
// were weighed before, it only does what was chosen.
type lineCount struct {
	budget *budget
	left   map[Place]bool
	counts bool // only the text says how much there is
	all    map[Place]weight
	kept   int
	over   bool
}

func newLineCount(b *budget, counts bool) *lineCount {
	return &lineCount{budget: b, left: b.places(), counts: counts, all: map[Place]weight{}}
}

// skip returns what rules.ParseSome asks.
func (c *lineCount) skip() func(rules.TableName, string, int) bool {
	switch {
	case c.counts:
		return c.count
	case len(c.left) == 0:
		return nil
	}
	return func(t rules.TableName, chain string, _ int) bool { return c.left[Place{t, chain}] }
}

// count counts a line. What is above the limit is not kept, whatever is chosen in the end.
func (c *lineCount) count(t rules.TableName, chain string, line int) bool {
	p := Place{t, chain}
	before := c.all[p]
	now := before
	now.add(line)
	c.all[p] = now
	if c.left[p] {
		return true
	}
	c.kept += now.units() - before.units()
	c.over = c.over || !c.budget.fits(c.kept)
	return c.over
}

// settled reports whether the chains that are left out now are those that were when it began.
func (c *lineCount) settled() bool {
	if !c.counts {
		return true
	}
	out, back := c.budget.choose(c.all)
	return len(out)+len(back) == 0 && !c.over
}
