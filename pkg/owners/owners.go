// Package owners is the table of the programs that write rules for good: one row for each [Owner].
//
// A row has the names of the owner's chains, the rules that it writes into built-in chains itself,
// its native nftables tables, its processes, and its habits: when it empties a chain, how it
// removes rules, whether it writes them again by itself. Presets of --protect, the judges of lost
// rules, the words for a native table and docs/presets.md read this table; no other package keeps
// such knowledge.
//
// [All] lists the rows. [OfChain], [OfRule] and [OfTable] find the owner of an object, and [Named]
// the rows of a word of --protect. [HabitsOf] and [EmptyingOf] return the habits of one table or
// chain, and [WritesTable] and [WritesChain] match a process with its objects.
//
// The package does no I/O. A missing owner is no error: the functions return false or nothing. The
// values do not change, so that any goroutine may read them.
package owners

import (
	"cmp"
	"slices"
)

// An Owner is one program, or one family of programs, that writes rules for good.
type Owner struct {
	Name  string // a short word, of one row only
	Title string // the programs, for people
	// Preset is the word of --protect that names all of the row; "": no word does, only globs and
	// words for single tables. Rows of one word are one preset.
	Preset string
	// Alone: Name is such a word too, for the subcommand cleanup. PresetNames does not list it.
	Alone bool
	// Source has the files that the row was read from, and their version.
	Source string
	// Tried says which rules the tests flush.
	Tried Trial
	// Docs is the address of the owner's own documents.
	Docs string

	Chains   []Chains
	Straight []Straight
	Tables   []Table

	// Processes are the programs that write the rules, by what the kernel calls them.
	Processes []string
	// Kin are globs of all its programs, whether or not they write rules. Each decides on its own
	// rules, and executes no jobs of others.
	Kin []string

	// Canary is the chain by which the owner notices a flush. It must not come back with a replay.
	Canary string
	// Heals says when the owner writes its rules again after a flush.
	Heals string
	// Removes says how the owner removes rules of its own.
	Removes Removal
	// Breaks says what a flush of the rules breaks until they are back.
	Breaks string
}

// A Trial is where the rules come from with which tests try a row.
type Trial string

// The origins of rules.
const (
	BySource  Trial = "source"  // written as its source does; of a row that says nothing
	BySaved   Trial = "nodes"   // saved on nodes of its users
	ByProgram Trial = "program" // written by the program itself
)

// TriedWith returns where the rules come from with which tests try the row.
func (o Owner) TriedWith() Trial { return cmp.Or(o.Tried, BySource) }

// A Removal is how an owner removes rules of its own.
type Removal string

// The ways to remove rules.
const (
	ByName     Removal = "name"  // rule by rule, or named chains in one restore
	ByFlush    Removal = "flush" // iptables -F CHAIN, and then -X
	WholeTable Removal = "table" // iptables-restore of all of a table
)

// Chains are chains of one owner that it treats alike.
type Chains struct {
	Names []Form
	// In are iptables' tables in which Emptied holds. In another table a chain is EmptyOften.
	In      []string
	Emptied Emptying
	// Piecewise: many containers or networks share each of the chains, and the owner writes the
	// rules of one at a time. That a chain holds rules says nothing of the others' rules.
	Piecewise bool
	// Hint: the chain holds no rule, and none leads to it.
	Hint bool
	// Mode names a mode or an age of the owner that has the chains: "" is the present one, of
	// kube-proxy that in iptables mode.
	Mode string
}

// A Straight is the form of a rule that an owner writes into a built-in chain itself, word by word
// as iptables-save prints it.
type Straight struct {
	Table, Chain string
	// Words are compared literally, except placeholders such as "<net>". A placeholder stands for
	// one word, the same wherever it occurs in the rule. "<bridge>" takes only the name of a bridge
	// that Docker made, "<cali>" a comment of Felix's, "<vni>" a match of Docker's for the number
	// of an overlay network, "<loopback>" a loopback address, and "<wg>" an interface whose name
	// begins with wg.
	Words []string
	// Comment is a glob of comments. Where it is set, there are no Words: whatever else the
	// rule has, the comment names its owner.
	Comment string
	// Unsigned: nothing in the form is its owner's own, so that another program, or a person, may
	// have written the rule. The preset names it where it is asked for by its word, and auto does
	// not.
	Unsigned bool
}

// All returns the table. The caller does not change it.
func All() []Owner { return table }

// Named returns the rows that a word of --protect names; none if it is no preset.
func Named(word string) []Owner {
	var found []Owner
	for _, o := range table {
		if word != "" && (o.Preset == word || o.Alone && o.Name == word) {
			found = append(found, o)
		}
	}
	return found
}

// Presets returns the words of --protect that name owners, in the order of the table.
func Presets() []string {
	var words []string
	for _, o := range table {
		if o.Preset != "" && !slices.Contains(words, o.Preset) {
			words = append(words, o.Preset)
		}
	}
	return words
}

// row returns the row of that name, which is there.
func row(name string) Owner {
	return table[slices.IndexFunc(table, func(o Owner) bool { return o.Name == name })]
}

// Hashed returns the forms of the chains whose names end with a hash, such as a container's.
func (o Owner) Hashed() []Form {
	var list []Form
	for _, c := range o.Chains {
		for _, f := range c.Names {
			if f.alphabet != "" {
				list = append(list, f)
			}
		}
	}
	return list
}

// has reports whether a chain's name is one of the owner's.
func (o Owner) has(chain string) bool {
	return slices.ContainsFunc(o.Chains, func(c Chains) bool { return c.matches(chain) })
}

func (c Chains) matches(chain string) bool {
	return slices.ContainsFunc(c.Names, func(f Form) bool { return f.Matches(chain) })
}

// table is the table: owners of Kubernetes first, then those of other containers and machines, and
// networks last. The first row that fits counts.
var table = slices.Concat(kubernetes, containers, networks)
