// Package conntrack ends flows that began while nat rules were missing.
//
// The kernel consults nat once per flow, at its first packet, and keeps the answer as long as
// packets arrive. A UDP client that first called a service during an outage, and keeps its port,
// therefore gets no answer long after the rules are back. SCTP behaves the same. A TCP client
// repeats its SYN for two minutes, and each SYN keeps the entry without a translation alive. Once
// the entry is deleted, the next packet is a first one.
//
// A TCP flow that has seen an answer is a connection, wherever it leads, and never ended.
//
// [Kernel.Look] reads the node's addresses and routes. [nat.Translations] computes how the nat
// rules translate on that node, and [Kernel.Sweep] ends the flows that these [Rules] would
// translate differently. After an error, [Deleted] still counts the ended flows.
//
// The zero Kernel is ready, and any number of goroutines may use it; Rules are for one at a time.
package conntrack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Kernel is the table of conntrack in the network namespace of the process. It needs
// CAP_NET_ADMIN and nothing else. The zero value is ready, and any goroutine may call its
// methods.
type Kernel struct {
	// plain sends no filter to the kernel, as if it were older than 5.8.
	plain bool
}

// Rules say how nat certainly treats flows, as [nat.Translations] do.
type Rules interface {
	// Translates reports whether the flow is sent to another destination.
	Translates(flow nat.Flow) bool
	// Masquerades reports whether the flow, once sent to backend, gets another source.
	Masquerades(flow nat.Flow, backend netip.AddrPort) bool
}

// Deleted counts the flows that were ended.
type Deleted struct {
	ByProtocol map[uint8]int
	// Unmasqueraded counts the ended flows that were sent to the right place with
	// the wrong source.
	Unmasqueraded int
}

// maxDeleted limits the flows that one sweep ends. Each takes two system calls,
// and the 200 bytes that name it stay in memory until the dump has ended.
const maxDeleted = 10000

// clockStep is the largest correction of the clock between since and the recorded
// start of a flow.
const clockStep = time.Second

// Sweep ends the flows of a family that nat would now treat otherwise:
//
//   - UDP flows that were not translated, and now would be;
//   - TCP and SCTP flows of that kind, if they have seen no answer: an answer makes
//     them connections, wherever they lead;
//   - flows of all three that were translated but not masqueraded, and now would be,
//     if they have seen no answer.
//
// The last two kinds end only if they began after since. By default the kernel
// does not record when a flow began (net.netfilter.nf_conntrack_timestamp is
// off). Then flows of any age end. A flow without an answer cannot get one, so
// its next packet can only win.
//
// The kernel filters out most of the other flows, if it can; Sweep checks each
// flow anyway. After an error, Deleted counts the flows that were ended before.
//
// A flow is named by its tuple and its ID, so a flow that ended meanwhile and
// began again is left alone. If a flow was chosen because it has no answer, Sweep
// checks it again right before it ends the flow.
func (k Kernel) Sweep(ctx context.Context, f tableid.Family, since time.Time, rules Rules) (Deleted, error) {
	s := sweep{ctx: ctx, family: f, rules: rules, deleted: Deleted{ByProtocol: map[uint8]int{}}}
	if !since.IsZero() {
		s.since = since.Add(-clockStep)
	}
	conn, err := dial(ctx, unix.NETLINK_NETFILTER)
	if err != nil {
		return s.deleted, fmt.Errorf("opening a socket to conntrack: %w", err)
	}
	defer conn.Close()
	s.conn = conn
	err = s.run(k.plain)
	if s.left > 0 {
		err = errors.Join(err, fmt.Errorf("%d flows of %s are left: one sweep deletes %d", s.left, f, maxDeleted))
	}
	return s.deleted, err
}

// A sweep is one call of Sweep.
type sweep struct {
	ctx    context.Context
	conn   *conn
	family tableid.Family
	since  time.Time // zero: flows of any age
	rules  Rules
	stuck  []entry // from the last dump
	taken  int     // number of stuck flows, also of earlier dumps
	left   int     // stuck flows beyond maxDeleted
	// answered counts the flows read that have seen an answer.
	answered int
	deleted  Deleted
}

// run first ends the flows without an answer, whose clients hang, and then the
// UDP flows that were answered untranslated. A kernel before 5.8 ignores both
// filters and returns the whole table. A kernel before 5.15 ignores the first. In
// both cases one pass is enough.
func (s *sweep) run(plain bool) error {
	if plain {
		return s.pass(filter{})
	}
	err := s.pass(filter{mask: statusSeenReply})
	if err == nil && s.answered <= fewAnswered {
		err = s.pass(filter{protocol: nat.UDP, status: statusSeenReply, mask: statusSeenReply | statusDstNAT})
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return s.pass(filter{})
	}
	return err
}

// pass reads flows that pass the filter, and ends the stuck ones. run calls it once or twice
// for a sweep.
func (s *sweep) pass(want filter) error {
	var errs []error
	if err := s.dump(want); err != nil {
		// The flows that were read are still ended: an interrupted dump can only
		// be incomplete.
		errs = append(errs, fmt.Errorf("reading conntrack's %s flows: %w", s.family, err))
	}
	for _, e := range s.stuck {
		if err := s.end(e); err != nil {
			// The next deletion would fail too.
			errs = append(errs, fmt.Errorf("deleting a flow of %s to %s: %w", s.family, e.flow.Destination, err))
			break
		}
	}
	s.stuck = s.stuck[:0]
	return errors.Join(errs...)
}

// fewAnswered is how many flows may get their answer while the kernel lists flows
// without one. If there are more, the kernel did not filter.
const fewAnswered = 100

// dump reads the flows that pass the filter, and on some kernels others. It keeps the stuck
// flows in s.stuck, for pass to end. s.left counts those above maxDeleted.
func (s *sweep) dump(want filter) error {
	return s.conn.ask(s.ctx, s.family, msgGet, unix.NLM_F_DUMP, want.encode(), func(message []byte) {
		e, ok := parseEntry(message)
		if e.seenReply {
			s.answered++
		}
		switch {
		case !ok || !s.isStuck(&e):
		case s.taken == maxDeleted:
			s.left++
		default:
			s.taken++
			e.attributes = bytes.Clone(e.attributes) // the buffer is used again
			s.stuck = append(s.stuck, e)
		}
	})
}

// isStuck reports whether a flow is to be ended: nat would treat it otherwise now, and it is no
// connection. dump keeps such a flow.
func (s *sweep) isStuck(e *entry) bool {
	switch {
	case !e.translated && e.flow.Protocol == nat.UDP:
		return s.rules.Translates(e.flow)
	case !e.isUnanswered() || !e.start.IsZero() && e.start.Before(s.since):
		return false
	case !e.translated:
		return s.rules.Translates(e.flow)
	default:
		return !e.masqueraded && s.rules.Masquerades(e.flow, e.backend)
	}
}

// end ends a flow, if it still exists and has not changed. Only a UDP flow without a
// translation needs no check: an answer would not save it.
func (s *sweep) end(e entry) error {
	if e.translated || e.flow.Protocol != nat.UDP {
		still, err := s.isUnchanged(e)
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
	case errors.Is(err, unix.ENOENT): // it ended without Sweep
		err = nil
	}
	return err
}

// isUnchanged reports whether a flow still has no answer. An answer since the dump made it a
// connection, and a flow that is gone is not unchanged.
func (s *sweep) isUnchanged(e entry) (bool, error) {
	still := false
	err := s.conn.ask(s.ctx, s.family, msgGet, 0, e.attributes, func(message []byte) {
		now, ok := parseEntry(message)
		still = ok && now.id == e.id && now.translated == e.translated && now.isUnanswered()
	})
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return still, err
}
