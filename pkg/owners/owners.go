// Package owners is the table of the programs that write rules for good: one row for each [Owner].
//
// A row has the names of the owner's chains and native nftables tables, and the rules that it
// writes into built-in chains itself. It also has the owner's processes and habits. The habits
// say when it empties a chain, how it removes rules, and whether it writes them again by
// itself. Presets of --protect, the judges of lost rules, the words for a native table and
// docs/presets.md read this table. No other package keeps such knowledge.
//
// [All] lists the rows. [OfChain], [OfRule] and [OfTable] find the owner of an object, and
// [Named] finds the rows of a word of --protect. [HabitsOf] and [EmptyingOf] return the habits
// for a table or chain, and [WritesTable] and [WritesChain] match a process with its objects.
//
// The package does no I/O. A missing owner is no error: the functions return false or nothing. The
// values do not change, so that any goroutine may read them.
package owners

import (
	"cmp"
	"slices"
)

// An Owner is a program, or a family of programs, that writes rules for good.
type Owner struct {
	Name  string // a short word, different in each row
	Title string // the programs, for people
	// Preset is the word of --protect that names the whole row. Without a Preset only globs and
	// words for single tables name parts of it. Rows with the same word are one preset.
	Preset string
	// Alone: Name is such a word too, for the subcommand cleanup. PresetNames does not list it.
	Alone bool
	// Source names the files on which the row is based, and their version.
	Source string
	// Tried is the origin of the rules that tests flush.
	Tried Trial
	// Docs is the address of the owner's own documents.
	Docs string

	Chains   []Chains
	Straight []Straight
	Tables   []Table

	// Processes are the programs that write the rules, by their names in the kernel.
	Processes []string
	// Kin are globs of all its programs, even programs that write no rules. Each decides on its
	// own rules, and executes no jobs of others.
	Kin []string

	// Canary is the chain by which the owner notices a flush. A replay must not bring it back.
	Canary string
	// Heals says when the owner writes its rules again after a flush.
	Heals string
	// Removes says how the owner removes rules of its own.
	Removes Removal
	// Breaks lists the services that a flush of the rules breaks until they are back.
	Breaks string
}

// A Trial is the origin of the rules with which tests try a row.
type Trial string

// The origins of rules.
const (
	BySource  Trial = "source"  // written as its source does; the default
	BySaved   Trial = "nodes"   // saved on nodes of its users
	ByProgram Trial = "program" // written by the program itself
)

// TriedWith returns the origin of the rules with which tests try the row.
func (o Owner) TriedWith() Trial { return cmp.Or(o.Tried, BySource) }

// A Removal is how an owner removes rules of its own.
type Removal string

// The ways to remove rules.
const (
	ByName     Removal = "name"  // rule by rule, or named chains in one restore
	ByFlush    Removal = "flush" // iptables -F CHAIN, and then -X
	WholeTable Removal = "table" // iptables-restore of all of a table
)

// Chains are chains that their owner treats alike.
type Chains struct {
	Names []Form
	// In are the tables of iptables in which Emptied holds. In another table a chain is
	// EmptyOften.
	In      []string
	Emptied Emptying
	// Piecewise: many containers or networks share each of the chains, and the owner writes the
	// rules of one at a time. So the presence of some rules says nothing about the others.
	Piecewise bool
	// Hint: the chain holds no rule, and no rule leads to it.
	Hint bool
	// Mode names a mode or an age of the owner that has the chains. "" is the present age, and
	// for kube-proxy the iptables mode.
	Mode string
}

// A Straight is the form of a rule that an owner writes into a built-in chain itself, word by word
// as iptables-save prints it.
type Straight struct {
	Table, Chain string
	// Words are compared literally, except placeholders such as "<net>". A placeholder matches
	// any single word, but the same word wherever it occurs in the rule. "<bridge>" matches
	// only the name of a bridge that Docker made, and "<cali>" a comment of Felix. "<vni>"
	// matches Docker's match for the number of an overlay network. "<loopback>" matches a
	// loopback address, and "<wg>" an interface whose name begins with wg.
	Words []string
	// Comment is a glob of comments. If it is set, there are no Words: the comment names the
	// owner of the rule, with any other words.
	Comment string
	// Unsigned: nothing in the form is its owner's own, so another program, or a person, may
	// have written the rule. The preset includes the rule if it is given by its word, but auto
	// does not.
	Unsigned bool
}

// All returns the table. The caller does not change it.
func All() []Owner { return table }

// Named returns the rows that a word of --protect names; nil for other words, which
// NewSelector takes for globs or refuses.
func Named(word string) []Owner {
	var found []Owner
	for _, o := range table {
		if word != "" && (o.Preset == word || o.Alone && o.Name == word) {
			found = append(found, o)
		}
	}
	return found
}

// Presets returns the words of --protect that name owners, in the order of the table. Errors
// and documents list them.
func Presets() []string {
	var words []string
	for _, o := range table {
		if o.Preset != "" && !slices.Contains(words, o.Preset) {
			words = append(words, o.Preset)
		}
	}
	return words
}

// row returns the row of that name, which must exist.
func row(name string) Owner {
	return table[slices.IndexFunc(table, func(o Owner) bool { return o.Name == name })]
}

// Hashed returns the forms of the chains whose names end with a hash, such as a container's.
// ContainerChains calls it.
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

// has reports whether the owner has a chain of that name.
func (o Owner) has(chain string) bool {
	return slices.ContainsFunc(o.Chains, func(c Chains) bool { return c.matches(chain) })
}

func (c Chains) matches(chain string) bool {
	return slices.ContainsFunc(c.Names, func(f Form) bool { return f.Matches(chain) })
}

// table is the table: first the owners of Kubernetes, then of other containers and machines,
// and last of networks. The first row that matches counts.
var table = slices.Concat(kubernetes, containers, networks)
