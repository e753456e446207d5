package nft

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// EachRule calls f for every rule of one chain, in order. A missing chain or
// table has none. f's argument is valid until f returns. The error is
// ErrInterrupted if f may have got a mixture of two states.
func (c *Conn) EachRule(family tableid.Family, table, chain string, f func(RuleMessage) error) error {
	attrs := Strings(
		StringAttr{unix.NFTA_RULE_TABLE, table},
		StringAttr{unix.NFTA_RULE_CHAIN, chain})
	err := c.dump(unix.NFT_MSG_GETRULE, unix.NFT_MSG_NEWRULE, family, attrs, func(data []byte) error {
		m, err := ParseRule(data)
		// Kernels before 4.3 ignore the chain in the request.
		if err != nil || string(m.Chain) != chain || string(m.Table) != table {
			return err
		}
		return f(m)
	})
	if err != nil { // a start reads 16,000 chains, and the text is seldom needed
		err = Wrap(fmt.Sprintf("reading chain %s of table %s", chain, table), err)
	}
	return err
}

// EachRuleOf is EachRule for all chains of a table, one chain after the other. It
// calls piece before the first rule of each datagram, because only the rules
// within one piece were read together. At each piece the kernel finds its place
// by the number of rules that it has sent. It also counts rules that a
// transaction under way has inserted before. No flag and no genid reports them,
// and if the transaction is given up, no notification does either
// (nf_tables_dump_rules, Linux 6.18).
func (c *Conn) EachRuleOf(family tableid.Family, table string, piece func(), f func(RuleMessage) error) error {
	attrs := Strings(StringAttr{unix.NFTA_RULE_TABLE, table})
	err := c.dumpPieces(unix.NFT_MSG_GETRULE, unix.NFT_MSG_NEWRULE, family, attrs, piece, func(data []byte) error {
		m, err := ParseRule(data)
		if err != nil || string(m.Table) != table {
			return err
		}
		return f(m)
	})
	return Wrap(fmt.Sprintf("reading table %s", table), err)
}

// EachRuleIn calls f for every rule of one table; a missing table has none. The
// error is ErrInterrupted if f may have got a mixture of two states.
func (c *Conn) EachRuleIn(family tableid.Family, table string, f func(RuleMessage) error) error {
	var chains []string
	uses := 0
	err := c.EachChain(family, func(chain Chain) error {
		if chain.Table == table {
			chains, uses = append(chains, chain.Name), uses+int(chain.Use)
		}
		return nil
	})
	if err != nil && !errors.Is(err, ErrInterrupted) {
		return err
	}
	if uses <= wholeMost {
		return c.EachRuleOf(family, table, func() {}, f)
	}
	for _, chain := range chains {
		err = errors.Join(err, c.EachRule(family, table, chain, f))
	}
	return err
}

// EachChain calls f for every chain of the family's tables. The mirror lists chains so. The
// error is ErrInterrupted if f may have got a mixture of two states.
func (c *Conn) EachChain(family tableid.Family, f func(Chain) error) error {
	err := c.dumpChains(family, nil, func(data []byte) error {
		chain, err := ParseChain(data)
		if err != nil {
			return err
		}
		return f(chain)
	})
	return Wrap("listing the chains", err)
}

// Chain reads one chain; ok is false if it does not exist. The mirror reads a changed chain
// so, and the standby looks so whether a chain is gone.
func (c *Conn) Chain(family tableid.Family, table, name string) (chain Chain, ok bool, err error) {
	attrs := []StringAttr{{unix.NFTA_CHAIN_TABLE, table}, {unix.NFTA_CHAIN_NAME, name}}
	ok, err = c.one(unix.NFT_MSG_GETCHAIN, family, attrs, func(data []byte) (err error) {
		chain, err = ParseChain(data)
		return err
	})
	ok = ok && chain.Table == table && chain.Name == name
	return chain, ok, Wrap(fmt.Sprintf("asking for chain %s of table %s", name, table), err)
}

// dump requests all objects of a kind and calls f with the data of each answer. f
// may change the data, which is valid until f returns.
//
// dump does not receive through the library, which hides the flags of the last
// message. That message alone may have NLM_F_DUMP_INTR, if rules after the dump's
// position were deleted. The library also copies each message, 20 MB for 46,578
// rules.
func (c *Conn) dump(ask, want uint16, family tableid.Family, attrs []byte, f func(data []byte) error) error {
	return c.dumpPieces(ask, want, family, attrs, func() {}, f)
}

// dumpPieces is dump, but calls piece before each datagram, for EachRuleOf. ask is the
// request's type, and want the type of the answers that f gets. It locks c.mu.
func (c *Conn) dumpPieces(ask, want uint16, family tableid.Family, attrs []byte, piece func(), f func(data []byte) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	sent, err := c.send(ask, netlink.Request|netlink.Dump, family, attrs)
	if err != nil {
		return err
	}
	d := dumper{want: uint16(nftType(want)), sequence: sent.Header.Sequence, f: f}
	for !d.done {
		datagram, err := receive(c.conn, c.buffer, true)
		if err == nil {
			piece()
			err = d.datagram(datagram)
		}
		if err == nil && errors.Is(d.failed, ErrEnough) {
			err = d.failed
		}
		if err != nil {
			c.torn = true // otherwise the next dump would receive the rest of this dump
			return err
		}
	}
	return d.result()
}

// receive receives one datagram from the kernel into buffer, for dumps and Events. With wait
// it waits until the connection's deadline; without wait it returns nil if there is no
// datagram. It ignores datagrams of other programs.
func receive(conn *netlink.Conn, buffer []byte, wait bool) ([]byte, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	for {
		var n, flags int
		var from unix.Sockaddr
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, _, flags, from, failed = unix.Recvmsg(int(fd), buffer, nil, 0)
			return !wait || !errors.Is(failed, unix.EAGAIN)
		})
		switch sender, _ := from.(*unix.SockaddrNetlink); {
		case err != nil:
			return nil, err
		case errors.Is(failed, unix.EAGAIN):
			return nil, nil
		case errors.Is(failed, unix.EINTR):
		case failed != nil:
			return nil, failed
		case sender == nil || sender.Pid != 0: // another program's
		case flags&unix.MSG_TRUNC != 0:
			return nil, errTruncated
		default:
			return buffer[:n], nil
		}
	}
}

// A dumper parses the datagrams of one dump.
type dumper struct {
	want        uint16
	sequence    uint32
	f           func(data []byte) error
	refused     error // the kernel's refusal
	failed      error // the first error of f; the dump is still received to its end
	interrupted error // ErrInterrupted if the kernel reports an interruption
	done        bool
}

func (d *dumper) result() error { return cmp.Or(d.refused, d.failed, d.interrupted) }

// datagram takes one datagram. Its error says that the kernel broke the protocol;
// then no later message can be trusted.
func (d *dumper) datagram(b []byte) error {
	return eachMessage(b, func(m []byte) error {
		// An answer to an earlier request, whose wait was given up, is ignored.
		if d.done || binary.NativeEndian.Uint32(m[8:]) != d.sequence {
			return nil
		}
		return d.message(m)
	})
}

// eachMessage calls f for every message of a datagram, for dumps and Events. A message has
// at least a struct nlmsghdr. The error is f's, or says that the datagram is damaged.
func eachMessage(datagram []byte, f func(message []byte) error) error {
	for len(datagram) > 0 {
		if len(datagram) < unix.SizeofNlMsghdr {
			return errShort
		}
		size := int(binary.NativeEndian.Uint32(datagram))
		if size < unix.SizeofNlMsghdr || size > len(datagram) {
			return errShort
		}
		if err := f(datagram[:size]); err != nil {
			return err
		}
		padded := (size + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1)
		datagram = datagram[min(padded, len(datagram)):]
	}
	return nil
}

// message takes one message of the dump: an answer, which f gets, or the end with the
// kernel's refusal. Its error says that the kernel broke the protocol.
func (d *dumper) message(m []byte) error {
	kind, flags, data := binary.NativeEndian.Uint16(m[4:]), binary.NativeEndian.Uint16(m[6:]), m[unix.SizeofNlMsghdr:]
	if flags&unix.NLM_F_DUMP_INTR != 0 {
		d.interrupted = ErrInterrupted
	}
	switch kind {
	case d.want:
		if d.failed == nil {
			d.failed = d.f(data)
		}
		return nil
	case unix.NLMSG_DONE, unix.NLMSG_ERROR:
		if len(data) < 4 {
			return errShort
		}
		d.done = true
		if errno := -int32(binary.NativeEndian.Uint32(data)); errno > 0 {
			d.refused = unix.Errno(errno)
		}
		return nil
	case unix.NLMSG_NOOP:
		return nil
	default:
		return fmt.Errorf("netlink answered with a message of type %#x, not %#x", kind, d.want)
	}
}
