package native

import (
	"fmt"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// WitnessName is the name of an empty table of canaryd's own in each family that it guards. A flush
// of the ruleset deletes it, but no owner of another table does. If another process has a table of
// that name, the witness's name gets a random end.
const WitnessName = "canaryd-witness"

// A Witness is the state of the witness of one family.
type Witness struct {
	Nonce string // in its comment; empty: there is no witness
	Table string // its name; empty: there is no witness
	// Taken: a table of another process has the name WitnessName.
	Taken bool
}

// commentType is NFTNL_UDATA_TABLE_COMMENT, the type of user data that nft shows as a comment.
const commentType = 0

// PlantWitness writes a witness into a batch. The kernel accepts it only if there is no table of
// that name. The nonce is its comment, and must be new for each planting.
func PlantWitness(b *nft.Batch, family tableid.Family, nonce string) error {
	return plantWitness(b, family, WitnessName, nonce)
}

// plantWitness is PlantWitness for a table of another name, if another process has the usual
// one. An error means that the nonce is empty or longer than 64 bytes.
func plantWitness(b *nft.Batch, family tableid.Family, name, nonce string) error {
	if len(nonce) == 0 || len(nonce) > 64 {
		return fmt.Errorf("a nonce of %d bytes", len(nonce))
	}
	b.Begin(uint16(nft.Tables), netlink.Create|netlink.Excl, family)
	b.Text(unix.NFTA_TABLE_NAME, name)
	b.Blob(tableUserdata, slices.Concat([]byte{commentType, byte(len(nonce) + 1)}, []byte(nonce), []byte{0}))
	b.End()
	return nil
}

// NewWitness returns a witness to be planted. nonce is not empty. taken: a table of another
// process has the usual name, so the witness's name gets the beginning of nonce.
func NewWitness(nonce string, taken bool) Witness {
	w := Witness{Nonce: nonce, Table: WitnessName, Taken: taken}
	if taken {
		w.Table += "-" + nonce[:min(len(nonce), 8)]
	}
	return w
}

// FindWitness returns the witness of a family; without one its Nonce is "". If the nonce that
// was planted is gone, the family was flushed. It reads the names of all tables only if no
// witness has the usual name.
func FindWitness(conn *nft.Conn, family tableid.Family) (w Witness, err error) {
	found, err := w.ask(conn, family, WitnessName)
	if err != nil || w.Nonce != "" {
		return w, err
	}
	w.Taken = found
	var others []string
	err = conn.EachTable(func(t nft.Table) error {
		if t.Family == family && strings.HasPrefix(t.Name, WitnessName+"-") {
			others = append(others, t.Name)
		}
		return nil
	})
	for _, name := range others {
		if err == nil && w.Nonce == "" {
			_, err = w.ask(conn, family, name)
		}
	}
	return w, err
}

// ask reads a table of that name, and stores it as the witness if it is one. found: there is
// such a table. A table that a process owns is no witness: no flush deletes it, even after that
// process has ended (NFT_TABLE_F_PERSIST).
func (w *Witness) ask(conn *nft.Conn, family tableid.Family, name string) (found bool, err error) {
	return conn.Object(nft.Tables, family, []nft.StringAttr{{Kind: unix.NFTA_TABLE_NAME, Value: name}}, func(attrs []byte) error {
		if nonce := comment(attrOf(attrs, tableUserdata)); number(attrs, tableFlags)&tableOwned == 0 && nonce != "" {
			w.Nonce, w.Table = nonce, name
		}
		return nil
	})
}

// comment returns a rule's comment, "" if it has none.
func (r Rule) comment() string { return comment(attrOf(r.Attrs, unix.NFTA_RULE_USERDATA)) }

// comment returns the comment in the user data of a table, rule or another object: a list of
// type, length and value. It is "" if there is none, or if the list is damaged. A witness has
// its nonce there.
func comment(userdata []byte) string {
	for len(userdata) >= 2 {
		kind, size := userdata[0], int(userdata[1])
		if len(userdata) < 2+size {
			return ""
		}
		if kind == commentType {
			return nft.String(userdata[2 : 2+size])
		}
		userdata = userdata[2+size:]
	}
	return ""
}
