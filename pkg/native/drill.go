package native

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file has the table that a drill takes in place of an owner's table.

const (
	// DrillName is the name of a table of canaryd's own that exists only during a drill. No packet
	// meets it, because none of its chains has a hook.
	DrillName = "canaryd-drill"
	// drillComment begins the comment of such a table, before its nonce.
	drillComment = "canaryd drill "
	drillChain   = "canary"
)

// IsDrill reports whether a table has the name of a drill's table.
func IsDrill(id tableid.TableID) bool { return id.Name == DrillName }

// DrillKinds returns the verdicts that a drill can cause with a table of its own.
func DrillKinds() []Verdict { return []Verdict{TableDeleted, Emptied, Replaced} }

// NewDrillTable returns the content of a drill's table: a chain with a rule, and a map with an
// element that leads there. The nonce is for its comment.
func NewDrillTable(family tableid.Family, nonce string) *Table {
	const inetService = 13 // the type of ports, in nft's numbers
	comment := drillComment + nonce
	verdict := func(code int32, chain string) []byte {
		v := appendNumber(nil, unix.NFTA_VERDICT_CODE, uint32(code))
		if chain != "" {
			v = nft.AppendAttr(v, unix.NFTA_VERDICT_CHAIN, chain, 1)
		}
		return appendNested(nil, unix.NFTA_DATA_VERDICT, v)
	}
	immediate := appendNested(appendNumber(nil, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT), unix.NFTA_IMMEDIATE_DATA, verdict(unix.NFT_RETURN, ""))
	expression := appendNested(nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "immediate", 1), unix.NFTA_EXPR_DATA, immediate)
	set := appendNumber(nil, unix.NFTA_SET_FLAGS, unix.NFT_SET_MAP)
	set = appendNumber(appendNumber(set, unix.NFTA_SET_KEY_TYPE, inetService), unix.NFTA_SET_KEY_LEN, 2)
	set = appendNumber(appendNumber(set, unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT), unix.NFTA_SET_DATA_LEN, 0)
	element := appendNested(nil, unix.NFTA_SET_ELEM_KEY, nft.AppendAttr(nil, unix.NFTA_DATA_VALUE, []byte{0, 80}, 0))
	element = appendNested(element, unix.NFTA_SET_ELEM_DATA, verdict(unix.NFT_GOTO, drillChain))
	return &Table{
		ID:    family.Table(DrillName),
		Attrs: nft.AppendAttr(nil, tableUserdata, slices.Concat([]byte{commentType, byte(len(comment) + 1)}, []byte(comment), []byte{0}), 0),
		Chains: []Chain{{Name: drillChain, Rules: []Rule{{
			Attrs: appendNested(nil, unix.NFTA_RULE_EXPRESSIONS, appendNested(nil, unix.NFTA_LIST_ELEM, expression)),
		}}}},
		Sets: []Set{{Name: "services", Flags: unix.NFT_SET_MAP, Attrs: set, Elements: []Element{element}}},
	}
}

// TakeDrill takes tables of a drill as a flusher does, at that genid. It deletes them or their
// rules, or makes them again as an older file has them. The transaction comes from another
// netlink address than Write's, so its commit counts as another process's. It returns when the
// kernel had taken them: the call returns later, because it closes a socket. The error is
// nft.ErrStale or a *nft.RefusedError if nothing was taken.
func (k *Kernel) TakeDrill(genid uint32, tables []*Table, kind Verdict) (at time.Time, err error) {
	b := nft.NewBatch()
	b.Guard(genid)
	for _, t := range tables {
		switch kind {
		case Emptied:
			b.Begin(unix.NFT_MSG_DELRULE, 0, t.ID.Family)
			b.Text(unix.NFTA_RULE_TABLE, t.ID.Name)
			b.End()
		case Replaced:
			old := *t
			old.Sets = nil
			if _, err := old.Replace(b, Options{}); err != nil {
				return time.Time{}, err
			}
		default:
			Delete(b, t.ID)
		}
	}
	b.Finish()
	at = time.Now()
	err = b.Send()
	return at.Add(b.Took), err
}

// RemoveDrills deletes the tables of drills in all families, also those of an earlier run. A
// table of another process with such a name stays. port is the netlink address of the
// transaction.
func RemoveDrills(port uint32) error {
	err := removeOwn(port, func(t nft.Table) bool { return t.Name == DrillName }, func(comment string) bool { return strings.HasPrefix(comment, drillComment) })
	if err != nil {
		return fmt.Errorf("removing the tables of a drill: %w", err)
	}
	return nil
}
