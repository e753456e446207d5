package standby

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file opens hooks by knocking: by datagrams to this process itself over loopback. Rules of
// the copy's OUTPUT see them and put the element into the gate's set, as they pass. A transaction
// waits for nf_tables' mutex, which a flusher holds until its commit is done, and again while its
// socket ends: 30 and 200 ms at 1,000 and 5,000 services (Linux 6.18). A packet waits for nothing.

// secret is what a knock begins with, behind the header of UDP. It is random, so that no datagram
// of another process's is one. Who may list rules or capture packets learns it, and so may a
// program to which a rule leads the knock; of those only a process of canaryd's own user can knock.
var secret = sync.OnceValue(func() (s [15]byte) {
	_, _ = rand.Read(s[:]) // it never fails
	return s
})

// knockOf returns the knock that opens a hook.
func knockOf(h Hook) []byte {
	s := secret()
	return append(s[:], byte(h))
}

// udpHeader is how long the header of a datagram is (RFC 768), in bytes.
const udpHeader = 8

// knocked is the rule that sees a hook's knock, sent by a process of this one's user, and opens the
// hook for packets of the knock's family.
func knocked(h Hook) rule {
	knock := knockOf(h)
	content := payload(unix.NFT_REG_1, unix.NFT_PAYLOAD_TRANSPORT_HEADER, udpHeader, uint32(len(knock)))
	is := number(number(nil, unix.NFTA_CMP_SREG, unix.NFT_REG_1), unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
	list := expression(expression(nil, "payload", content), "cmp", value(is, unix.NFTA_CMP_DATA, knock))
	user := number(number(nil, unix.NFTA_META_KEY, unix.NFT_META_SKUID), unix.NFTA_META_DREG, unix.NFT_REG_1)
	own := number(number(nil, unix.NFTA_CMP_SREG, unix.NFT_REG_1), unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
	own = value(own, unix.NFTA_CMP_DATA, binary.NativeEndian.AppendUint32(nil, uint32(os.Geteuid())))
	list = expression(expression(list, "meta", user), "cmp", own)
	list = expression(list, "meta", nfProto())
	add := nft.AppendAttr(nil, unix.NFTA_DYNSET_SET_NAME, setOf(h), 1)
	add = number(number(add, unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_UPDATE), unix.NFTA_DYNSET_SREG_KEY, unix.NFT_REG_1)
	return rule{expressions: expression(list, "dynset", add)}
}

// knock opens hooks of a table that has gates, without a transaction. After an error some of them
// may be open: the packets of this node's own may be dropped or untracked before they come to nat.
func (s *Standby) knock(t *table, hooks []Hook) error {
	for _, f := range packetsOf(t.id.Family) {
		for _, h := range knocks(hooks, t.open) {
			if err := s.knockAt(t, h, f); err != nil {
				return fmt.Errorf("knocking at %s for %s: %w", h, f, err)
			}
		}
	}
	return nil
}

// knocks returns where to knock so that hooks open, and in which order. The hooks that give flows
// their source come first, so that none is sent elsewhere without. They come last, too, also where
// they are open already: they are not to be over before the others are.
func knocks(hooks []Hook, open map[Hook]bool) (order []Hook) {
	sources, destinations := []Hook{Postrouting, Input}, []Hook{Prerouting, Output}
	var sends bool
	for _, h := range append(slices.Clone(sources), destinations...) {
		if slices.Contains(hooks, h) {
			order = append(order, h)
			sends = sends || slices.Contains(destinations, h)
		}
	}
	for _, h := range sources {
		if sends && (slices.Contains(hooks, h) || open[h]) {
			order = append(order, h)
		}
	}
	return order
}

// knockAt opens a hook for packets of one family. What drops the knock behind nat, which send calls
// an error, does not matter.
func (s *Standby) knockAt(t *table, h Hook, family tableid.Family) error {
	sent := send(family, knockOf(h))
	is, err := s.conn.HasElement(t.id.Family, t.name, setOf(h), []byte{uint8(family)})
	switch {
	case err == nil && is:
		return nil
	case err == nil && sent == nil:
		return errUnheard
	}
	return errors.Join(sent, err)
}

// errUnheard: the rules of OUTPUT did not see a knock.
var errUnheard = errors.New("no rule saw it")

// send sends a datagram over loopback, from one new socket to another: only the first packet of a
// flow comes to nat. What the kernel does with it on its way out, rules included, is done when send
// returns, unless a rule before nat queues it for a program (NFQUEUE).
func send(family tableid.Family, datagram []byte) error {
	network, loopback := "udp4", "127.0.0.1:0"
	if family == tableid.IPv6 {
		network, loopback = "udp6", "[::1]:0"
	}
	to, err := net.ListenPacket(network, loopback)
	if err != nil {
		return err
	}
	from, err := net.Dial(network, to.LocalAddr().String())
	if err != nil {
		return errors.Join(err, to.Close())
	}
	_, err = from.Write(datagram)
	return errors.Join(err, from.Close(), to.Close())
}
