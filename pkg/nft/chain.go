package nft

import "golang.org/x/sys/unix"

// A Chain is a chain as nf_tables holds it.
type Chain struct {
	Table, Name string
	Handle      uint64 // unique among all chains and rules that the table ever had
	// Base reports that packets enter the chain at one of the kernel's hooks.
	// Kind, Hook, Priority and Policy are set only for such a chain.
	Base     bool
	Kind     string // "filter", "nat" or "route"
	Hook     uint32
	Priority int32
	Policy   uint32 // NF_DROP is 0, NF_ACCEPT is 1
	Use      uint32 // rules in the chain, and jumps to it
}

// ParseChain reads NFT_MSG_NEWCHAIN, from a dump, an answer or a notification.
func ParseChain(data []byte) (c Chain, err error) {
	err = eachAttrOf(data, func(kind uint16, value []byte) (err error) {
		switch kind {
		case unix.NFTA_CHAIN_TABLE:
			c.Table = commonName(UntilNUL(value))
		case unix.NFTA_CHAIN_NAME:
			c.Name = String(value)
		case unix.NFTA_CHAIN_HANDLE:
			c.Handle, err = AttrUint64(value)
		case unix.NFTA_CHAIN_USE:
			c.Use, err = AttrUint32(value)
		case unix.NFTA_CHAIN_TYPE:
			c.Kind = String(value)
		case unix.NFTA_CHAIN_POLICY:
			c.Policy, err = AttrUint32(value)
		case unix.NFTA_CHAIN_HOOK:
			err = c.parseHook(value)
		}
		return err
	})
	return c, err
}

// parseHook reads NFTA_CHAIN_HOOK, the hook and the priority of a base chain, for
// ParseChain.
func (c *Chain) parseHook(list []byte) error {
	c.Base = true
	return EachAttr(list, func(kind uint16, value []byte) (err error) {
		switch kind {
		case unix.NFTA_HOOK_HOOKNUM:
			c.Hook, err = AttrUint32(value)
		case unix.NFTA_HOOK_PRIORITY:
			var priority uint32
			priority, err = AttrUint32(value)
			c.Priority = int32(priority)
		}
		return err
	})
}
