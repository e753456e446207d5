package native

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// WitnessName is an empty table of canaryd's own in each family that it guards. A flush of the
// ruleset takes it along; no owner of another table does.
const WitnessName = "canaryd-witness"

// commentType is NFTNL_UDATA_TABLE_COMMENT, a piece of user data that nft shows as a comment.
const commentType = 0

// PlantWitness writes a witness into a batch, which the kernel takes only if there is none. The
// nonce, its comment, is another one for each planting.
func PlantWitness(b *nft.Batch, family tableid.Family, nonce string) error {
	if len(nonce) == 0 || len(nonce) > 64 {
		return fmt.Errorf("a nonce of %d bytes", len(nonce))
	}
	b.Begin(uint16(nft.Tables), netlink.Create|netlink.Excl, family)
	b.Text(unix.NFTA_TABLE_NAME, WitnessName)
	b.Blob(tableUserdata, slices.Concat([]byte{commentType, byte(len(nonce) + 1)}, []byte(nonce), []byte{0}))
	b.End()
	return nil
}

// Witness returns the nonce of a family's witness, "" if none stands.
func Witness(conn *nft.Conn, family tableid.Family) (nonce string, err error) {
	asked := []nft.StringAttr{{Kind: unix.NFTA_TABLE_NAME, Value: WitnessName}}
	_, err = conn.Object(nft.Tables, family, asked, func(attrs []byte) error {
		if nonce = comment(attrOf(attrs, tableUserdata)); nonce == "" {
			return errNonceless
		}
		return nil
	})
	return nonce, err
}

var errNonceless = errors.New("the table " + WitnessName + " has no nonce in its comment")

// comment returns the comment in a table's user data: a list of type, length and value.
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
