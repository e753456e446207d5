// Package conntrack ends flows that began while nat rules were missing.
//
// The kernel asks nat once per flow, at its first packet, and remembers the answer for as long
// as packets come. A client that asked a service's address over UDP during an outage, and keeps
// asking from the same port, is therefore not heard long after the rules are back; so it goes
// for SCTP. A TCP client sends its SYN again for two minutes, and each one keeps the entry
// without a translation alive. Once the entry is gone, its next SYN is a first packet.
//
// What has seen an answer is a connection, wherever it leads, and TCP's are never ended.
//
// [Kernel.Look] takes up the node's addresses, rules.Generation.Translations what the nat rules
// do on it, and [Kernel.Sweep] ends the flows that these [Rules] would treat otherwise. The
// zero Kernel is ready and may be used by any number of goroutines; Rules are for one at a
// time. After an error [Deleted] still counts what was ended.
package conntrack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Kernel is conntrack's table in the network namespace of the process. It
// needs CAP_NET_ADMIN and nothing else. The zero value is ready, and its
// methods may be called by any goroutine.
type Kernel struct {
	// plain leaves all filtering to us, as kernels before 5.8 do.
	plain bool
}

// Rules tell what nat does to flows, for sure: rules.Translations does.
type Rules interface {
	// Translates reports whether the flow is sent somewhere else.
	Translates(flow rules.Flow) bool
	// Masquerades reports whether the flow, which was sent to backend, gets
	// another source.
	Masquerades(flow rules.Flow, backend netip.AddrPort) bool
}

// Deleted counts the flows that were ended.
type Deleted struct {
	ByProtocol map[uint8]int
	// Unmasqueraded are those among them that were sent to the right place
	// with the wrong source.
	Unmasqueraded int
}

// mostDeleted is how many flows one sweep ends. Each takes two system calls,
// and the message that names it is kept until the dump has ended: 200 bytes.
const mostDeleted = 10000

// clockStep is how far the clock may have been set between a time that is given
// and the start of a flow that conntrack noted.
const clockStep = time.Second

// Sweep ends the flows of a family that nat would treat otherwise today:
//
//   - those of UDP that were not translated, and would be;
//   - those of TCP and SCTP too, as long as no answer came: it would make them
//     connections, wherever they lead;
//   - of all three those that were translated but not masqueraded, and would
//     be, as long as no answer came.
//
// The last two only if they began after since. Where the kernel does not note
// when a flow began (net.netfilter.nf_conntrack_timestamp is off, which is its
// default) all of them end: a flow that is stuck without an answer cannot get
// one, whenever it began, and its next packet has everything to win.
//
// The kernel leaves out most of the flows that are of no concern, where it can;
// each one is looked at all the same. The flows that were ended are counted
// also if there is an error.
//
// A flow is named by its tuple and its ID, so one that was ended meanwhile and
// began again is left alone. One that was chosen for its lack of an answer is
// asked for again right before it is ended.
func (k Kernel) Sweep(ctx context.Context, f rules.Family, since time.Time, nat Rules) (Deleted, error) {
	s := sweep{ctx: ctx, family: f, nat: nat, deleted: Deleted{ByProtocol: map[uint8]int{}}}
	if !since.IsZero() {
		s.since = since.Add(-clockStep)
	}
	conn, err := dial(ctx)
	if err != nil {
		return s.deleted, fmt.Errorf("opening a socket to conntrack: %w", err)
	}
	defer conn.Close()
	s.conn = conn
	err = s.all(k.plain)
	if s.left > 0 {
		err = errors.Join(err, fmt.Errorf("%d more flows of %s are to be deleted than the %d of one sweep", s.left, f, mostDeleted))
	}
	return s.deleted, err
}

// A sweep is one Sweep under way.
type sweep struct {
	ctx    context.Context
	conn   *conn
	family rules.Family
	since  time.Time // zero: of whatever age
	nat    Rules
	stuck  []entry // that the last dump showed
	taken  int     // with those of the dumps before
	left   int     // flows that are one too many
	// answered counts the flows that were read and have seen an answer.
	answered int
	deleted  Deleted
}

// all ends first the flows that were not answered, whose clients hang, and then
// those of UDP that were answered untranslated. Kernels before 5.8 answer each
// question with the whole table, those before 5.15 the first one: then it is
// enough.
func (s *sweep) all(plain bool) error {
	if plain {
		return s.pass(filter{})
	}
	err := s.pass(filter{mask: statusSeenReply})
	if err == nil && s.answered <= fewAnswered {
		err = s.pass(filter{protocol: rules.UDP, status: statusSeenReply, mask: statusSeenReply | statusDstNAT})
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return s.pass(filter{})
	}
	return err
}

// pass reads flows and ends those that are stuck.
func (s *sweep) pass(want filter) error {
	var errs []error
	if err := s.dump(want); err != nil {
		// What was read is ended all the same; an interrupted dump may only
		// have left some out.
		errs = append(errs, fmt.Errorf("reading conntrack's %s flows: %w", s.family, err))
	}
	for _, e := range s.stuck {
		if err := s.end(e); err != nil {
			// The next one would fare no better.
			errs = append(errs, fmt.Errorf("deleting a flow of %s to %s: %w", s.family, e.flow.Destination, err))
			break
		}
	}
	s.stuck = s.stuck[:0]
	return errors.Join(errs...)
}

// fewAnswered is how many flows may get their answer while the kernel writes
// that they have none.
const fewAnswered = 100

func (s *sweep) dump(want filter) error {
	return s.conn.dump(s.ctx, s.family, want, func(message []byte) {
		e, ok := parseEntry(message)
		if e.seenReply {
			s.answered++
		}
		s.take(e, ok)
	})
}

// take keeps a flow that is to be ended.
func (s *sweep) take(e entry, ok bool) {
	switch {
	case !ok || !s.ends(&e):
	case s.taken == mostDeleted:
		s.left++
	default:
		s.taken++
		e.attributes = bytes.Clone(e.attributes) // the rest of the buffer can go
		s.stuck = append(s.stuck, e)
	}
}

// ends reports whether a flow is to be ended.
func (s *sweep) ends(e *entry) bool {
	switch {
	case !e.translated && e.flow.Protocol == rules.UDP:
		return s.nat.Translates(e.flow)
	case !e.silent() || !e.start.IsZero() && e.start.Before(s.since):
		return false
	case !e.translated:
		return s.nat.Translates(e.flow)
	default:
		return !e.masqueraded && s.nat.Masquerades(e.flow, e.backend)
	}
}

// end ends a flow, if it is still there and still the same.
func (s *sweep) end(e entry) error {
	if e.translated || e.flow.Protocol != rules.UDP {
		still, err := s.still(e)
		if err != nil || !still {
			return err
		}
	}
	err := s.conn.ask(s.ctx, s.family, msgDelete, unix.NLM_F_ACK, e.attributes, func([]byte) {})
	switch {
	case err == nil:
		s.deleted.ByProtocol[e.flow.Protocol]++
		if e.translated {
			s.deleted.Unmasqueraded++
		}
	case errors.Is(err, unix.ENOENT): // it ended by itself
		err = nil
	}
	return err
}

// still reports whether no answer has come to a flow since it was read.
func (s *sweep) still(e entry) (bool, error) {
	still := false
	err := s.conn.ask(s.ctx, s.family, msgGet, 0, e.attributes, func(message []byte) {
		now, ok := parseEntry(message)
		still = ok && now.id == e.id && now.translated == e.translated && now.silent()
	})
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return still, err
}
