package native

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file makes kube-proxy in nftables mode do a full sync.

// SyncChain is the empty chain by which canaryd makes kube-proxy do a full sync. kube-proxy takes
// it for the chain of a removed service, because its name has a "/".
const SyncChain = "canaryd/full-sync"

// FullSync reports whether a commit to the table t did what a full sync of kube-proxy does: it
// wrote the rules of base chains again. Other syncs write only the chains of changed services.
func (d *Deed) FullSync(t *Table) bool {
	return !d.Deleted && d.Made == 0 && d.New > 0 && slices.ContainsFunc(t.Chains, func(c Chain) bool { return c.Base && d.Rules[c.Name] > 0 })
}

// errNoServices: kube-proxy's table has no map of services, or nothing in it.
var errNoServices = errors.New("it has no services")

// RequestFullSync makes kube-proxy in nftables mode do a full sync, in which it reads its table t
// and writes all of it. One transaction at that genid makes SyncChain, and an element in the map of
// services that leads there. In its next sync kube-proxy notes the chain as one to be deleted. In a
// later sync, at least a second afterwards, the kernel refuses that deletion, because the element
// leads to the chain. Then kube-proxy does a full sync, which deletes the element, and at last it
// deletes the chain (k8s.io/kubernetes/pkg/proxy/nftables, 1.36). No packet has the
// element's key, whose address is 0. The error is nft.ErrStale if another process committed.
func (k *Kernel) RequestFullSync(genid uint32, t *Table) error {
	b := nft.NewBatch()
	b.Port = k.port
	b.Guard(genid)
	if err := t.requestFullSync(b); err != nil {
		return fmt.Errorf("table %s: %w", t.ID.NFT(), err)
	}
	b.Finish()
	return b.Send()
}

func (t *Table) requestFullSync(b *nft.Batch) error {
	s := t.setsByName()[owners.ProxyServices]
	if s == nil || len(s.Elements) == 0 {
		return errNoServices
	}
	// The key of a service begins with its address.
	key := bytes.Clone(nft.AttrPath(s.Elements[0], unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE))
	address := 4
	if t.ID.Family == tableid.IPv6 {
		address = 16
	}
	clear(key[:min(address, len(key))])
	verdict := nft.AppendAttr(appendNumber(nil, unix.NFTA_VERDICT_CODE, goTo), unix.NFTA_VERDICT_CHAIN, SyncChain, 1)
	element := appendNested(nil, unix.NFTA_SET_ELEM_KEY, nft.AppendAttr(nil, unix.NFTA_DATA_VALUE, key, 0))
	element = appendNested(element, unix.NFTA_SET_ELEM_DATA, appendNested(nil, unix.NFTA_DATA_VERDICT, verdict))
	b.Begin(uint16(nft.Chains), netlink.Create, t.ID.Family)
	b.Text(unix.NFTA_CHAIN_TABLE, t.ID.Name)
	b.Text(unix.NFTA_CHAIN_NAME, SyncChain)
	b.End()
	b.Begin(uint16(nft.Elements), netlink.Create, t.ID.Family)
	b.Text(unix.NFTA_SET_ELEM_LIST_TABLE, t.ID.Name)
	b.Text(unix.NFTA_SET_ELEM_LIST_SET, owners.ProxyServices)
	b.Blob(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, appendNested(nil, unix.NFTA_LIST_ELEM, element))
	b.End()
	return nil
}

// goTo is NFT_GOTO, a negative number, as an attribute has it.
const goTo uint32 = 1<<32 + unix.NFT_GOTO
