package native

import (
	"cmp"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Deed is the effect of one commit on one table, by its notifications.
type Deed struct {
	Genid   uint32
	Deleted bool   // the commit deleted the table
	Made    uint64 // the handle of the table that the commit made, after a deletion or not; 0: none
	// WitnessLost: the same commit deleted the family's witness.
	WitnessLost bool
	// With is a table of another owner that the same commit deleted, as a flush does; empty: no
	// such table is known. The caller of Hear may set it.
	With string
	By   Committer
	// ByName: the committer's command line names the rule, chain, set or element that it deletes.
	ByName bool
	// Rules and Elements count the removals from each chain and set, deleted or not.
	Rules, Elements map[string]int
	Chains          map[string]int // deleted chains
	Closed          map[string]int // base chains that the commit wrote with policy drop
	Lost            int            // deleted chains, sets, objects and flowtables
	New             int            // added or altered objects, except the table itself
}

// A Committer is the kind of process that made a commit.
type Committer uint8

// The committers.
const (
	UnknownCommitter Committer = iota
	Owner                      // the table's owner
	NotOwner                   // a unit that loads rules from a file
	Shell                      // a person's shell or a script
	// LikelyOwner: the process had ended before canaryd could read it. A process of the table's
	// owner lived then, with a slightly lower PID. It had started after the last write to the
	// table.
	LikelyOwner
)

// MayTake reports whether the commit, by its effect, may have removed objects of another owner.
// Such a commit deleted or made the table, deleted the witness, or removed objects and wrote
// nothing. An owner may do the same.
func (d *Deed) MayTake() bool {
	took := len(d.Rules)+len(d.Elements)+d.Lost > 0
	return d.Deleted || d.WitnessLost || d.Made != 0 || took && d.New == 0
}

// MayRemove reports whether the commit may have removed a part like one in quarantine, if the table
// had it.
func (d *Deed) MayRemove(h Held) bool {
	return d.Deleted || d.Rules[h.Name]+d.Elements[h.Name]+d.Chains[h.Name] > 0 || d.Lost > 0 && h.Kind != nft.Rules
}

// flush reports whether the commit deleted more than one owner's tables.
func (d *Deed) flush() bool { return d.WitnessLost || d.With != "" }

// rules returns the number of removed rules, in deleted chains too. tookChain takes more than
// one in a table without rules for a flush.
func (d *Deed) rules() (n int) {
	for _, went := range d.Rules {
		n += went
	}
	return n
}

// pure reports whether the commit only removed parts of an existing table.
func (d *Deed) pure() bool { return d.New == 0 && !d.Deleted && d.Made == 0 }

// A Recorder makes deeds from notifications. Its zero value is ready. It is for one goroutine.
type Recorder struct {
	deeds   map[tableid.TableID]*Deed
	witness map[tableid.Family]bool // families that lost their witness
	// names has the names of the witnesses. A family without an entry has WitnessName.
	names map[tableid.Family]string
}

// Take records one notification: the message's number without the subsystem, and its
// attributes. For the NFT_MSG_NEWGEN that ends a commit, call End instead. An error means that
// the message is damaged, and that the deeds of its commit are incomplete.
func (r *Recorder) Take(message uint16, family tableid.Family, attrs []byte) error {
	table := nft.String(attrOf(attrs, unix.NFTA_TABLE_NAME)) // 1 in all messages
	if table == "" {
		return fmt.Errorf("a notification of nf_tables, number %d: %w", message, errNameless)
	}
	if strings.HasPrefix(table, WitnessName) {
		if message == unix.NFT_MSG_DELTABLE && table == cmp.Or(r.names[family], WitnessName) {
			r.loseWitness(family)
		}
		return nil
	}
	d := r.deed(family.Table(table))
	switch message {
	case unix.NFT_MSG_DELTABLE:
		*d = Deed{Deleted: true}
	case unix.NFT_MSG_NEWTABLE:
		handle, err := nft.AttrUint64(attrOf(attrs, tableHandle))
		if err != nil {
			return fmt.Errorf("a notification of table %s: %w", table, err)
		}
		d.Made = handle
	case unix.NFT_MSG_DELRULE:
		count(&d.Rules, nft.String(attrOf(attrs, unix.NFTA_RULE_CHAIN)), 1)
	case unix.NFT_MSG_DELSETELEM:
		n := 0
		if err := decodeElements(attrs, func(Element) { n++ }); err != nil {
			return err
		}
		count(&d.Elements, nft.String(attrOf(attrs, unix.NFTA_SET_ELEM_LIST_SET)), n)
	case unix.NFT_MSG_DELCHAIN:
		count(&d.Chains, nft.String(attrOf(attrs, unix.NFTA_CHAIN_NAME)), 1)
		d.Lost++
	case unix.NFT_MSG_DELSET, unix.NFT_MSG_DELOBJ, unix.NFT_MSG_DELFLOWTABLE:
		d.Lost++
	case unix.NFT_MSG_NEWCHAIN:
		if closes(attrs) {
			count(&d.Closed, nft.String(attrOf(attrs, unix.NFTA_CHAIN_NAME)), 1)
		}
		d.New++
	default:
		d.New++
	}
	return nil
}

// End ends a commit and returns its deeds, by table; a commit that changed no table has none.
// The caller knows the committer, and sets By.
func (r *Recorder) End(c nft.Commit) map[tableid.TableID]*Deed {
	all := r.deeds
	for id, d := range all {
		d.Genid, d.WitnessLost = c.Genid, r.witness[id.Family]
	}
	r.drop()
	return all
}

// drop forgets the commit in progress.
func (r *Recorder) drop() { *r = Recorder{names: r.names} }

// deed returns the deed of the present commit on a table, and makes it at the first
// notification.
func (r *Recorder) deed(id tableid.TableID) *Deed {
	if r.deeds == nil {
		r.deeds = map[tableid.TableID]*Deed{}
	}
	if r.deeds[id] == nil {
		r.deeds[id] = &Deed{}
	}
	return r.deeds[id]
}

// loseWitness notes that the present commit deleted the family's witness. End gives it to all
// deeds in that family, also to those that it recorded before.
func (r *Recorder) loseWitness(family tableid.Family) {
	if r.witness == nil {
		r.witness = map[tableid.Family]bool{}
	}
	r.witness[family] = true
}

// count adds n to the entry of that name, for the removals in a Deed. It makes the map if there
// is none.
func count(in *map[string]int, name string, n int) {
	if *in == nil {
		*in = map[string]int{}
	}
	(*in)[name] += n
}
