package owners

import (
	"path"
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Table is a native nftables table, in each family in which its owner makes one.
type Table struct {
	Name     string
	Families []tableid.Family
	Habits   Habits // the zero Habits: they are not known
	// Back and Accepted say for people what the habits mean: which emptied part comes back, and
	// which counts as the owner's doing.
	Back, Accepted string
}

// A Habit is how an owner empties one of its chains or sets of a native table, while packets still
// come to it. A commit that empties it in another way is not the owner's.
type Habit uint8

// The habits.
const (
	// Empties: it takes the last rules or elements, and does nothing else in that commit.
	Empties Habit = iota
	// Keeps: it never leaves a chain empty, nor takes the elements of a set and nothing else.
	Keeps
	// Together: with the last rule of the chain it takes rules of other chains, or deletes chains.
	Together
	// Singly: it takes one rule in each commit.
	Singly
	// ByComment: it takes all rules of a comment, which names a pod, from all chains at once.
	ByComment
	// OneAlone: it may take the only element of a set and nothing else, but never several.
	OneAlone
)

// Habits are an owner's ways in its own native table that look like a flush of a part.
type Habits struct {
	// Known: the program that writes the table is known. Of others each deletion by name counts as
	// its owner's.
	Known bool
	// KeepsHandles: it deletes rules by the handles that it remembers.
	KeepsHandles bool
	// Resyncs: it reads its tables again by itself, and writes what they lack.
	Resyncs bool

	Base, Others Habit // of chains that have no row
	Sets         Habit // of sets that have no row
	Rows         []HabitRow
}

// A HabitRow is the habit of the chains or sets whose names match a pattern.
type HabitRow struct {
	Pattern string
	Habit   Habit
	// But is the comment of a rule: in a table that has one, the chain may lose its last rule
	// alone.
	But string
}

// unknownHabits are of a table that a word names: each may be a person's. A commit that takes one
// rule may have deleted that rule by its handle.
var unknownHabits = Habits{Base: Singly, Others: Empties, Sets: Empties}

// HabitsOf returns the habits of the owner that is known to write a table of that name.
func HabitsOf(id tableid.TableID) Habits {
	if _, t, found := tableNamed(id.Name); found && t.Habits.Known {
		return t.Habits
	}
	return unknownHabits
}

// WritersOf returns the programs that write a table of that name, by what the kernel calls them.
func WritersOf(id tableid.TableID) []string {
	o, _, _ := tableNamed(id.Name)
	return o.Processes
}

// tableNamed returns the native table of that name, whatever its family, and its owner.
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

// Chain returns the habit for a chain; base: packets come to it by a hook.
func (h Habits) Chain(name string, base bool) Habit {
	if base {
		return h.of(name, h.Base)
	}
	return h.of(name, h.Others)
}

// Set returns the habit for a set.
func (h Habits) Set(name string) Habit { return h.of(name, h.Sets) }

// But returns the comment of the rules next to which the chain may lose its last rule alone; "" if
// it has no such exception.
func (h Habits) But(chain string) string {
	i := slices.IndexFunc(h.Rows, func(r HabitRow) bool { return r.matches(chain) })
	if i < 0 {
		return ""
	}
	return h.Rows[i].But
}

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

// both are the IP families, for an owner that makes a table in each.
var both = []tableid.Family{tableid.IPv4, tableid.IPv6}

// IDs returns the tables by family.
func (t Table) IDs() []tableid.TableID {
	var ids []tableid.TableID
	for _, f := range t.Families {
		ids = append(ids, f.Table(t.Name))
	}
	return ids
}

// PresetOf returns the word of --protect that names a native table; "" if no preset does.
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
