package native

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Ruleset is the result of a capture: whole tables at one genid. It is a value; the bytes in it
// are shared and must not be changed.
type Ruleset struct {
	Genid  uint32
	At     time.Time // when it was read; see LeftAt
	Tables map[tableid.TableID]*Table
	// uses has the kernel's use count of each chain, until the reader has checked it.
	uses map[tableid.TableID][]uint32
	// known has the tables that were followed instead of read.
	known map[tableid.TableID]knownTable
	// Drifted lists, in order, the tables whose read differs from the notifications of all commits.
	// There should be none.
	Drifted []tableid.TableID
	// LeftOut has the tables that are too large, with their weights at the last count: Tables lacks
	// them. A count ends where the table is too large. These need not be tables of this capture.
	LeftOut map[tableid.TableID]nft.Weight
	// Fleeting has the tables of this read with sets that packets or time may change. Such a table
	// may fit again without a commit.
	Fleeting map[tableid.TableID]bool
	budget   budget // the Kernel's next one
}

// A knownTable has the digest of a followed table, and its LeftAt.
type knownTable struct {
	digest Digest
	leftAt time.Time
}

func (r *Ruleset) followed(id tableid.TableID) bool {
	_, followed := r.known[id]
	return followed
}

// Digest returns the digest of a table in the capture. It computes the digest of a table that
// was read, and knows it of a followed table.
func (r *Ruleset) Digest(id tableid.TableID) Digest {
	if r.followed(id) {
		return r.known[id].digest
	}
	return r.Tables[id].Digest()
}

// LeftAt returns the time to which the remaining timeouts of a table refer. A replay subtracts
// the time since then (Options.Age). It is older than At for a followed table.
func (r *Ruleset) LeftAt(id tableid.TableID) time.Time {
	if r.followed(id) {
		return r.known[id].leftAt
	}
	return r.At
}

// InOrder returns the tables in the order in which they were made. They should be made again in
// that order, because chains of equal priority run in it.
func (r *Ruleset) InOrder() []*Table {
	return slices.SortedFunc(maps.Values(r.Tables), func(a, b *Table) int { return cmp.Compare(a.Handle, b.Handle) })
}

// A Table is one table with everything in it, in a form that the kernel accepts again.
type Table struct {
	ID     tableid.TableID
	Handle uint64 // a new one for each creation
	Flags  uint32
	Owner  uint32 // the netlink address of the socket that owns it; 0: no owner
	// Attrs are the attributes of a message that makes the table: flags and user data. Other
	// objects have Attrs in the same way, without names and handles.
	Attrs      []byte
	Chains     []Chain // in the kernel's order
	Objects    []Object
	Flowtables []Flowtable
	Sets       []Set
}

// Dormant reports whether the kernel attaches none of the table's chains.
func (t *Table) Dormant() bool { return t.Flags&tableDormant != 0 }

// Immune reports whether one process owns the table, so that no other can flush or write it.
func (t *Table) Immune() bool { return t.Owner != 0 || t.Flags&tableOwned != 0 }

// A Chain is a chain and its rules.
type Chain struct {
	Name   string
	Handle uint64
	Base   bool // packets enter it at a hook
	// Bound: the chain belongs to the single rule that jumps to it, and is deleted with it.
	Bound bool
	Attrs []byte
	Rules []Rule
}

// A Rule is one rule: its expressions and user data.
type Rule struct {
	Handle uint64
	Attrs  []byte
}

// expressions returns the content of the rule's list of expressions.
func (r Rule) expressions() []byte { return attrOf(r.Attrs, unix.NFTA_RULE_EXPRESSIONS) }

// A Set is a set or a map and its elements.
type Set struct {
	Name   string
	Handle uint64
	Flags  uint32
	Attrs  []byte
	// Elements are in an order in which the kernel accepts them.
	Elements []Element
}

// Anonymous reports whether the set belongs to the single rule that names it, and is deleted with
// it.
func (s *Set) Anonymous() bool { return s.Flags&setAnonymous != 0 }

// Dynamic reports whether rules add elements. The kernel does not notify of these.
func (s *Set) Dynamic() bool { return s.Flags&setEval != 0 }

// An Element has the attributes of one element.
type Element []byte

// An Object is a stateful object: a counter, quota, limit, helper and so on.
type Object struct {
	Name   string
	Type   uint32 // NFT_OBJECT_COUNTER and so on; names are unique for each type
	Handle uint64
	Attrs  []byte
}

// settings returns the object's data without counted values, for its digest and its words; nil
// for a counter, which has no others.
func (o Object) settings() []byte {
	data := attrOf(o.Attrs, unix.NFTA_OBJ_DATA)
	switch o.Type {
	case unix.NFT_OBJECT_COUNTER:
		return nil
	case unix.NFT_OBJECT_QUOTA:
		return withoutState("quota", data)
	}
	return data
}

// A Flowtable is a flowtable. Its flows are not known.
type Flowtable struct {
	Name   string
	Handle uint64
	Attrs  []byte
}

// Chain returns the chain of that name, nil if there is none.
func (t *Table) Chain(name string) *Chain { return t.chainsByName()[name] }

// chainsByName and setsByName are for many lookups in one table. The values point into the
// table's lists. A nil table has no lists, and must not be passed.
func (t *Table) chainsByName() map[string]*Chain {
	all := make(map[string]*Chain, len(t.Chains))
	for i := range t.Chains {
		all[t.Chains[i].Name] = &t.Chains[i]
	}
	return all
}

// setsByName returns the table's sets by name. Sets that belong to rules are among them.
func (t *Table) setsByName() map[string]*Set {
	all := make(map[string]*Set, len(t.Sets))
	for i := range t.Sets {
		all[t.Sets[i].Name] = &t.Sets[i]
	}
	return all
}

// Empty reports whether the table has no effect on packets: it has no rule, no element, and no
// base chain that drops by policy. The deletion of such a table is no loss.
func (t *Table) Empty() bool {
	if _, rules, elements := t.Counts(); rules+elements > 0 {
		return false
	}
	return !slices.ContainsFunc(t.Chains, func(c Chain) bool { return closes(c.Attrs) })
}

// closes reports whether a chain with these attributes drops by policy.
func closes(chain []byte) bool {
	const drop = 0 // NF_DROP
	return has(chain, unix.NFTA_CHAIN_POLICY) && number(chain, unix.NFTA_CHAIN_POLICY) == drop
}

// Policies returns the base chains in their order, and their policies in iptables' words:
// ACCEPT or DROP. canaryd reports a chain that drops by policy, and did not before.
func (t *Table) Policies() (chains []string, policies map[string]string) {
	policies = map[string]string{}
	for i := range t.Chains {
		c := &t.Chains[i]
		if !c.Base {
			continue
		}
		policies[c.Name] = "ACCEPT"
		if closes(c.Attrs) {
			policies[c.Name] = "DROP"
		}
		chains = append(chains, c.Name)
	}
	return chains, policies
}
