package native

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
)

// A Repair puts one table back.
type Repair struct {
	Remedy Remedy
	Want   *Table
	Now    *Table        // for ByRefill and ByMerge
	Age    time.Duration // since Want was read

	held   map[Spot]hold // left out
	single map[int]bool  // sets whose elements have a message each
	fresh  map[Spot]bool // for ByAdmission: missing parts
}

// NewRepair returns the repair of a table. now is the present table, or nil. want was read that
// long ago. The kernel never changes the comment of a table (nf_tables_updtable reads its flags).
// So a table that was made again without its comment, and has no rule and no element, is replaced
// and not refilled. A set with some of its elements is its owner's newer word.
func NewRepair(remedy Remedy, want, now *Table, age time.Duration) Repair {
	r := Repair{Remedy: remedy, Want: want, Now: now, Age: age}
	if r.fills() && now.Flags == want.Flags && comment(attrOf(now.Attrs, tableUserdata)) == "" &&
		comment(attrOf(want.Attrs, tableUserdata)) != "" && r.emptied() &&
		!slices.ContainsFunc(now.Sets, func(s Set) bool { return len(s.Elements) > 0 }) {
		r.Remedy = ByReplace
	}
	return r
}

func (r Repair) write(b *nft.Batch) (left []string, err error) { return r.writeSought(b, nil) }

// writeSought writes the repair into a batch, for Kernel.Append. left are the devices that it
// left out. leaveRefused writes again with seek, which finds the parts that the kernel refused;
// nil: no search.
func (r Repair) writeSought(b *nft.Batch, seek *seeker) (left []string, err error) {
	o := Options{Age: r.Age, Lacks: lacksDevice, held: r.held, single: r.single, fresh: r.fresh, seek: seek}
	if owners.HabitsOf(r.Want.ID).KeepsHandles && r.Remedy != ByAdmission {
		if left, err = r.writeWithHandles(b, o); !errors.Is(err, ErrHandles) {
			return left, err
		}
	}
	switch r.Remedy {
	case ByCreate:
		return r.Want.Create(b, o)
	case ByReplace:
		return r.Want.Replace(b, o)
	case ByRefill:
		return r.Want.Refill(b, r.Now, o)
	case ByMerge:
		return r.Want.Merge(b, r.Now, o)
	case ByAdmission:
		w := newWriter(b, r.Want, o)
		err = w.contents()
		return w.leftBy, err
	}
	return nil, nil
}

// writeWithHandles writes the whole table with the handles that its owner remembers. It never
// replaces an existing table with rules, because a rule may be its owner's newer word. In that
// case, or if the old handles cannot be restored, the error is ErrHandles and nothing is written.
func (r Repair) writeWithHandles(b *nft.Batch, o Options) (left []string, err error) {
	before := b.Mark()
	switch {
	case r.fills() && !r.emptied():
		return nil, fmt.Errorf("table %s exists with rules: %w", r.Want.ID, ErrHandles)
	case r.Remedy != ByCreate:
		Delete(b, r.Want.ID)
	}
	if left, err = r.Want.CreateWithHandles(b, o); err != nil {
		b.Cut(before)
	}
	return left, err
}

// emptied reports whether the present table has no rule, and no part that is new or altered.
// Then there is nothing of its owner to keep, so the repair may replace the table or restore
// its handles. An altered comment does not count.
func (r Repair) emptied() bool {
	return !slices.ContainsFunc(r.Now.Chains, func(c Chain) bool { return len(c.Rules) > 0 }) &&
		!slices.ContainsFunc(Diff(r.Want, r.Now), func(c Change) bool {
			return c.Altered && (c.Kind != nft.Tables || r.Now.Flags != r.Want.Flags) || c.Made || c.New > 0
		})
}

// fills reports whether the repair fills the present table, whose content stays.
func (r Repair) fills() bool { return r.Remedy == ByRefill || r.Remedy == ByMerge }

// merged reports whether now, a read after a merge, shows all elements that the merge writes.
// Else Repaired would accept a set that lacks as many elements as before.
func (r Repair) merged(now *Table) bool {
	before, after := r.Now.setsByName(), now.setsByName()
	return !slices.ContainsFunc(r.Written().Sets, func(s Set) bool {
		return s.merges(before[s.Name]) && (after[s.Name] == nil || len(s.lacking(after[s.Name])) > 0)
	})
}

// Repaired reports whether a table is as a repair should leave it; else the replay is not
// proved. now is a read after the repair; nil: no table. lacking means that the repair left out
// devices. After a refill, all parts that it put back must exist, and the owner's newer words
// too. Parts that the repair left out are not missing.
func (r Repair) Repaired(now *Table, lacking bool) bool {
	if now == nil || r.Remedy == ByMerge && !r.merged(now) {
		return false
	}
	want := r.Written()
	changes := Diff(want, now)
	before, led, chains := map[string]Change{}, map[string]bool{}, want.chainsByName()
	if r.fills() {
		for name := range now.jumps() {
			led[name] = true
		}
		for _, c := range Diff(want, r.Now) {
			before[fmt.Sprint(c.Kind, c.Name)] = c
		}
	}
	for _, c := range changes {
		was, differed := before[fmt.Sprint(c.Kind, c.Name)]
		switch {
		case c.Kind == nft.Chains && was.Empty && c.Empty && !led[c.Name] && !chains[c.Name].Base:
			// A refill leaves a chain empty that its owner empties before deleting it.
		case c.Empty, differed && (c.Lost > was.Lost || was.Empty && (c.Lost+c.New > 0 || !was.Altered)):
			return false // an emptied part may differ only in its own attributes, as before
		case !differed && (!lacking || c.Lost > 0 || c.Gone || c.Made):
			return false
		}
	}
	return true
}
