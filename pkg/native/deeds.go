package native

import (
	"cmp"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Deed is what one commit did to one table, as its notifications say.
type Deed struct {
	Genid   uint32
	Deleted bool   // the table went
	Made    uint64 // the handle of a table that came, behind a deletion or without one; 0: none did
	// WitnessLost: the family's witness went in the same commit.
	WitnessLost bool
	// With is a table of another owner that the same commit deleted, as a flush does; empty: none
	// is known. The caller of Hear may set it.
	With string
	By   Committer
	// ByName: the committer's command line names the rule, chain, set or element that it deletes.
	ByName bool
	// Rules and Elements are how many went from each chain and set that stayed or went.
	Rules, Elements map[string]int
	Chains          map[string]int // deleted ones
	Closed          map[string]int // base chains that it wrote with a policy of drop
	Lost            int            // chains, sets, objects and flowtables that went
	New             int            // whatever came or was altered, the table aside
}

// A Committer is what is known of the process that made a commit.
type Committer uint8

// The committers.
const (
	UnknownCommitter Committer = iota
	Owner                      // the table's owner
	NotOwner                   // a unit that loads rules from a file
	Stranger                   // a person's shell or a script
	// LikelyOwner: it was gone before it could be read, and a process of the table's owner that had
	// started since the table was last written lived then, with a number shortly below its.
	LikelyOwner
)

// MayTake reports whether the commit may have taken what is not its author's, by what it did: it
// deleted or made the table, or took something and wrote nothing. An owner may do the same.
func (d *Deed) MayTake() bool {
	took := len(d.Rules)+len(d.Elements)+d.Lost > 0
	return d.Deleted || d.WitnessLost || d.Made != 0 || took && d.New == 0
}

// flush reports whether the commit deleted more than one owner's tables.
func (d *Deed) flush() bool { return d.WitnessLost || d.With != "" }

// rules returns how many rules went from chains that stayed or went.
func (d *Deed) rules() (n int) {
	for _, went := range d.Rules {
		n += went
	}
	return n
}

// pure reports whether the commit only took away from a table that stood.
func (d *Deed) pure() bool { return d.New == 0 && !d.Deleted && d.Made == 0 }

// A Recorder makes deeds of notifications. Its zero value is ready. It is for one goroutine.
type Recorder struct {
	deeds   map[tableid.TableID]*Deed
	witness map[tableid.Family]bool // whose witness went
	// names are the witnesses'; of a family without one it is WitnessName.
	names map[tableid.Family]string
}

// Take takes in one notification: the message's number without the subsystem, and its
// attributes. The NFT_MSG_NEWGEN that ends a commit is for End.
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

// End ends a commit and returns what it did, by table. The caller knows of the committer.
func (r *Recorder) End(c nft.Commit) map[tableid.TableID]*Deed {
	all := r.deeds
	for id, d := range all {
		d.Genid, d.WitnessLost = c.Genid, r.witness[id.Family]
	}
	r.drop()
	return all
}

// drop forgets the commit that is being recorded.
func (r *Recorder) drop() { *r = Recorder{names: r.names} }

func (r *Recorder) deed(id tableid.TableID) *Deed {
	if r.deeds == nil {
		r.deeds = map[tableid.TableID]*Deed{}
	}
	if r.deeds[id] == nil {
		r.deeds[id] = &Deed{}
	}
	return r.deeds[id]
}

func (r *Recorder) loseWitness(family tableid.Family) {
	if r.witness == nil {
		r.witness = map[tableid.Family]bool{}
	}
	r.witness[family] = true
}

func count(in *map[string]int, name string, n int) {
	if *in == nil {
		*in = map[string]int{}
	}
	(*in)[name] += n
}
