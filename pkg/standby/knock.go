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

// This file opens hooks by knocking: by datagrams of this process to itself over loopback. Rules of
// the copy's OUTPUT match them and add the element to the gate's set. A transaction waits for
// nf_tables' mutex. A flusher holds that mutex until its commit is done, and again while its socket
// ends. That takes 30 and 200 ms at 1,000 and 5,000 services (Linux 6.18). A packet waits for
// nothing.

// secret is the beginning of a knock, behind the header of UDP. It is random, so that no datagram
// of another process is a knock. Processes that may list rules or capture packets can learn it, and
// so can a program to which a rule leads the knock. Of them, only processes of canaryd's own user
// can knock.
var secret = sync.OnceValue(func() (s [15]byte) {
	_, _ = rand.Read(s[:]) // it never fails
	return s
})

// knockOf returns the knock that opens a hook.
func knockOf(h Hook) []byte {
	s := secret()
	return append(s[:], byte(h))
}

// udpHeader is the length of a datagram's header (RFC 768), in bytes.
const udpHeader = 8

// knocked returns the rule that matches a hook's knock from a process of this process's user.
// inFront puts it into OUTPUT. The rule opens the hook for packets of the knock's family.
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

// knock opens hooks of a table that has gates, without a transaction. After an error some of
// them may be open, and openByKnock opens them by a transaction. Rules may drop or untrack the
// node's own packets before nat, and then no rule of the copy sees a knock.
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

// knocks returns the hooks at which to knock, in order. open has the open hooks. The hooks that
// translate sources are first, so that no flow gets another destination without its source.
// They are last, too, even if they are open already: they must not expire before the others.
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

// knockAt opens a hook for packets of one family, and reads the gate's set to be sure. An error
// of send does not matter if the hook is open: the knock was dropped behind nat. If nothing
// failed and the hook is shut, the error is errUnheard.
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

// errUnheard reports that the rules of OUTPUT did not see a knock.
var errUnheard = errors.New("no rule saw it")

// send sends a knock over loopback, from one new socket to another: only the first packet of a
// flow reaches nat. When send returns, the packet has passed the kernel's rules on its way out.
// A rule before nat that queues it for a program (NFQUEUE) is an exception.
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
