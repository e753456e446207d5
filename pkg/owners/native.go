package owners

import (
	"path"
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Table is a native nftables table, in each family in which its owner makes it.
type Table struct {
	Name     string
	Families []tableid.Family
	Habits   Habits // the zero Habits: unknown
	// Back and Accepted describe the habits for people: the emptied parts that canaryd puts
	// back, and the parts whose emptying counts as the owner's doing.
	Back, Accepted string
}

// A Habit is the way in which an owner empties a chain or set of its native table that packets
// still reach. A commit that empties it in another way is not the owner's.
type Habit uint8

// The habits.
const (
	// Empties: the owner deletes the last rules or elements, and does nothing else in that
	// commit.
	Empties Habit = iota
	// Keeps: the owner never leaves a chain empty, and never deletes a set's elements without
	// other changes.
	Keeps
	// Together: with the last rule of the chain the owner deletes rules of other chains, or
	// deletes chains.
	Together
	// Singly: the owner deletes one rule in each commit.
	Singly
	// ByComment: the owner deletes all rules with one comment, which names a pod, from all
	// chains at once.
	ByComment
	// OneAlone: the owner may delete a set's only element without other changes, but never
	// several.
	OneAlone
)

// Habits are the ways of an owner with its own native table that look like a flush of a part.
type Habits struct {
	// Known: the program that writes the table is known. In other tables each deletion by name
	// counts as the owner's.
	Known bool
	// KeepsHandles: the owner deletes rules by handles that it remembers.
	KeepsHandles bool
	// Resyncs: the owner reads its tables again by itself, and writes the missing parts.
	Resyncs bool

	Base, Others Habit // of chains without a row
	Sets         Habit // of sets without a row
	Rows         []HabitRow
}

// A HabitRow is the habit of the chains or sets whose names match a pattern.
type HabitRow struct {
	Pattern string
	Habit   Habit
	// But is the comment of a rule. In a table that has such a rule, the chain may lose its
	// last rule alone.
	But string
}

// unknownHabits are the habits for a table that only a word names, because a person may write
// it. A commit that deletes one rule may have deleted it by its handle.
var unknownHabits = Habits{Base: Singly, Others: Empties, Sets: Empties}

// HabitsOf returns the habits of the known owner of a table of that name, in any family. The
// judge of native tables decides by them whether a deletion is the owner's or a loss.
func HabitsOf(id tableid.TableID) Habits {
	if _, t, found := tableNamed(id.Name); found && t.Habits.Known {
		return t.Habits
	}
	return unknownHabits
}

// WritersOf returns the kernel's names of the programs that write a table of that name.
func WritersOf(id tableid.TableID) []string {
	o, _, _ := tableNamed(id.Name)
	return o.Processes
}

// tableNamed returns the native table of that name, in any family, and its owner, for
// HabitsOf and WritersOf; false if the name is unknown.
func tableNamed(name string) (Owner, Table, bool) {
	for _, o := range table {
		for _, t := range o.Tables {
			if t.Name == name {
				return o, t, true
			}
		}
	}
	return Owner{}, Table{}, false
}

// Chain returns the habit for a chain; base: packets enter it through a hook. The judge of
// native tables treats an emptied chain by it.
func (h Habits) Chain(name string, base bool) Habit {
	if base {
		return h.of(name, h.Base)
	}
	return h.of(name, h.Others)
}

// Set returns the habit for a set.
func (h Habits) Set(name string) Habit { return h.of(name, h.Sets) }

// But returns the comment of a rule that lets the chain lose its last rule alone; "" if the
// chain has no such exception. The judge of native tables calls it.
func (h Habits) But(chain string) string {
	i := slices.IndexFunc(h.Rows, func(r HabitRow) bool { return r.matches(chain) })
	if i < 0 {
		return ""
	}
	return h.Rows[i].But
}

// of returns the habit of the first row that fits the name, else other.
func (h Habits) of(name string, other Habit) Habit {
	for _, r := range h.Rows {
		if r.matches(name) {
			return r.Habit
		}
	}
	return other
}

func (r HabitRow) matches(name string) bool {
	is, err := path.Match(r.Pattern, name)
	return err == nil && is
}

// both are the IP families, for an owner that makes a table in both.
var both = []tableid.Family{tableid.IPv4, tableid.IPv6}

// IDs returns the tables by family.
func (t Table) IDs() []tableid.TableID {
	var ids []tableid.TableID
	for _, f := range t.Families {
		ids = append(ids, f.Table(t.Name))
	}
	return ids
}

// PresetOf returns the word of --protect that names a native table, for proposals and for
// OwnersDiffer; "" if no preset does.
func PresetOf(id tableid.TableID) string {
	for _, o := range table {
		for _, t := range o.Tables {
			if o.Preset != "" && t.Name == id.Name && slices.Contains(t.Families, id.Family) {
				return o.Preset
			}
		}
	}
	return ""
}
