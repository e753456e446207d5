package daemon

import (
	"context"
	"errors"
	"net"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Standby has a copy of each table that translates, iptables' nat or a native table, in a table
// of its own behind a gate. The copy translates what the table does not, but only while the gate is
// open.
//
// Each call may commit to nf_tables, as one of canaryd's own. The loop calls it in a step, or in a
// heal before it reads: a commit between a replay's read and its write would make that stale.
type Standby interface {
	// Follow brings copies to what ought to be in force, and says of each one its state. It writes
	// one of nat only where that is asked for, and else translates it.
	Follow(ctx context.Context, wants ...StandbyWant) map[tableid.TableID]StandbyCopy
	// Gate opens the gate, in one transaction with what the copy lacks, or without one if that is
	// nothing. Of nat it opens those hooks whose path lost something. Or it shuts it for all hooks,
	// for which it needs the ID only. With an error of shutting there is no table any more; the
	// error wraps standby.ErrNotBuilt if there was none.
	Gate(want StandbyWant, order GateOrder) (StandbyGate, error)
	// Release deletes the copy, if there is one.
	Release(id tableid.TableID) error
}

// A StandbyWant is what ought to be in force of a table.
type StandbyWant struct {
	ID     tableid.TableID
	Nat    StandbyNat // of iptables' nat
	Native NativeWant // of a native table; without a Table it is iptables' nat
}

// StandbyConfig is what the standby needs.
type StandbyConfig struct {
	Table Standby // nil: there is none
	Auto  bool    // only where a replay is estimated to take more than standbyFrom
	Off   string  // why there is none of iptables' nat; "" unless there is none
	// NativeOff is why there is none of native tables although --standby asks for it, for as long
	// as canaryd runs; "" unless Table is nil.
	NativeOff string
}

// A StandbyNat is what ought to be in force of iptables' nat, and the digest of the read that
// showed that it is.
type StandbyNat struct {
	Section rules.Section
	Digest  uint64
	// Known: this was translated already. Write: it is to be written now, and not only translated.
	Known, Write bool
}

// A NativeWant is what ought to be in force of a native table, and the digest of that.
type NativeWant struct {
	Table  *native.Table
	Digest native.Digest
}

// A StandbyCopy says what became of a copy.
type StandbyCopy struct {
	Chains   int // that it has
	Uncopied int // that accept what they get, because a rule of theirs cannot be copied
	// Unfinished: the copy is being built, and each call does a part of that, so that the loop may
	// look at the rules in between.
	Unfinished bool
	// Err is why there may be no copy; with ErrStandbyMoved or ErrStandbyUnread it is as it was.
	Err error
}

// A GateOrder says what is to become of a gate.
type GateOrder int

// The orders.
const (
	ShutGate GateOrder = iota
	// OpenGate opens the gate also if the kernel does not take what is outstanding.
	OpenGate
	// OpenCurrent opens the gate only together with what is outstanding; if the kernel does not
	// take that, the error is ErrStandbyOutdated.
	OpenCurrent
)

// A StandbyGate says what became of a gate.
type StandbyGate struct {
	Open bool
	// Outdated says why the gate was opened without what is outstanding; nil: it was not.
	Outdated error
	Commits  int // that this took
	// Shut is when the gate was shut by its own limit, before it was asked for; zero: it was not.
	Shut time.Time
	// Barred says why hooks stay shut whose path lost something.
	Barred map[string]string
}

// ErrStandbyMoved: nat may hold by now what was not examined yet.
var ErrStandbyMoved = errors.New("another process has written since nat was examined")

// ErrStandbyOutdated: the copy cannot get what it lacks, and is not to be opened without that.
var ErrStandbyOutdated = errors.New("the copy lacks what was learned")

// ErrStandbyUnread: nat could not be read.
var ErrStandbyUnread = errors.New("nat could not be read for the standby")

const (
	// standbyFrom is the estimated time of a replay from which --standby=auto has a standby: 600
	// services with iptables-nft on 2 cores (Linux 6.18).
	standbyFrom = 100 * time.Millisecond
	// standbyEvery is the time between two changes of the copy. Each keeps other writers out for
	// as long as the kernel checks all chains: 6 to 22 ms at 1,000 services, 35 ms at 5,000.
	standbyEvery = time.Second
	// standbyShare bounds what translating takes to 2 % of a core, as long as that makes the copy
	// no older than standbyEvery.
	standbyShare = 50
	// pieceRest is the time between two pieces of a build. The loop takes hints and requests only
	// while no chore is due.
	pieceRest = time.Millisecond
	// standbyMost is how long the gate is open for one loss: an owner may have removed by then what
	// the copy still has.
	standbyMost = 30 * time.Second
)

// standbyOf is what the loop knows of one family's standby.
type standbyOf struct {
	state  api.StandbyState
	reason string
	copy   StandbyCopy

	section     rules.Section // that was copied
	lag         standbyLag    // of section
	outstanding int           // chains in which it differs from the generation,
	counted     int           // of that edition

	latest    rules.Section // that was translated; opening writes it, too
	latestLag standbyLag

	moved   uint64       // the digest at which another process had written already; 0: none had
	basis   standbyBasis // of the last decision; while it is the same, so is the copy
	next    time.Time    // not before: it is translated again
	written time.Time    // when the copy was written last
	unkept  bool         // what was translated is not written yet
	begun   bool         // the copy is being built,
	pieceAt time.Time    // not before: the next piece of it is written

	making making
	gate   gate
}

// standbyBasis is what decides about a family's copy.
type standbyBasis struct {
	edition int           // of the generation
	base    []rules.Chain // nat's built-in chains, with the rules of others
	mode    api.Mode      // observe writes nothing but marks
}

func (b standbyBasis) equal(o standbyBasis) bool {
	return b.edition == o.edition && b.mode == o.mode && slices.EqualFunc(b.base, o.base, sameChain)
}

func sameChain(a, b rules.Chain) bool { return a.Name == b.Name && slices.Equal(a.Rules, b.Rules) }

// has reports whether there is a copy that may be opened.
func (s *standbyOf) has() bool {
	return s.state == api.StandbyArmed || s.state == api.StandbyOpen
}

func (d *Daemon) hasStandby() bool { return d.cfg.Standby.Table != nil && d.cfg.Standby.Off == "" }

// standbyBasis returns what decides about the family's copy now; false while nat is not known to be
// in force as its owners want it. A copy of what a flush left would be none.
func (st *state) standbyBasis(f rules.Family) (standbyBasis, bool) {
	fs := st.families[f]
	nat := fs.tables[rules.Nat]
	b := standbyBasis{edition: st.generation.edition, mode: st.mode}
	for _, name := range rules.BuiltinChains(rules.Nat) {
		if c := nat.standing.table.Chain(name); c != nil {
			b.base = append(b.base, *c)
		}
	}
	if st.mode != api.Heal {
		return b, true
	}
	calm := st.loss == nil && nat.verdict == canary.Intact && !nat.pending && !nat.learningStopped && fs.examined.dirty.IsZero() && !fs.standby.gate.isOpen()
	return b, calm && !st.generation.captured.IsZero()
}

// followAt returns when a family's copy is decided about. What changes nat every few milliseconds
// is followed once in standbyEvery.
func (d *Daemon) followAt(st *state) time.Time {
	if !d.hasStandby() {
		return time.Time{}
	}
	var first time.Time
	for f, fs := range st.families {
		s := &fs.standby
		basis, known := st.standbyBasis(f)
		if !known {
			continue
		}
		switch {
		case s.moved != 0 && s.moved == fs.examined.digest: // examined first
		case !s.making.tryAt.IsZero():
			first = earliest(first, s.making.tryAt)
		case !basis.equal(s.basis):
			first = earliest(first, latest(d.made, s.next))
		case s.begun:
			first = earliest(first, latest(d.made, s.pieceAt))
		case s.unkept:
			first = earliest(first, s.written.Add(standbyEvery))
		}
	}
	return first
}

// followNat makes, follows or deletes the copies. It is a step of the loop's, as the keeper's is.
func (d *Daemon) followNat(ctx context.Context, st *state) {
	g, now := st.want(), time.Now()
	var all []StandbyWant
	for f, fs := range st.families {
		s := &fs.standby
		basis, known := st.standbyBasis(f)
		same, write := basis.equal(s.basis), due(s.written.Add(standbyEvery), now)
		switch {
		case !known, !s.making.tryAt.IsZero() && !due(s.making.tryAt, now):
			continue
		case same && s.making.tryAt.IsZero() && !s.begun && !(s.unkept && write), !same && s.making.tryAt.IsZero() && now.Before(s.next):
			continue
		}
		s.basis, s.moved = basis, 0
		again := !s.making.tryAt.IsZero()
		s.making.tryAt = time.Time{}
		switch why := d.standbyIdle(st, g, f); {
		case st.mode != api.Heal:
			d.releaseStandby(ctx, st, f, s, api.StandbyOff, "observe mode writes nothing but marks")
		case why != "":
			d.releaseStandby(ctx, st, f, s, api.StandbyIdle, why)
		default:
			id := f.Table(rules.Nat)
			all = append(all, StandbyWant{ID: id, Nat: StandbyNat{Section: g[id], Digest: fs.examined.digest, Known: same && !again, Write: write}})
		}
	}
	if len(all) == 0 {
		return
	}
	st.memory.scheduleFree(now)
	copies := d.cfg.Standby.Table.Follow(ctx, all...)
	took := time.Since(now)
	for _, want := range all {
		f, copied := want.ID.Family, copies[want.ID]
		s := &st.families[f].standby
		s.next = now.Add(took + min(standbyShare*took, standbyEvery))
		d.takeCopy(ctx, f, s, want.Nat, copied)
		if errors.Is(copied.Err, net.ErrClosed) {
			d.standbySocketGone(ctx, st, copied.Err)
		}
	}
}

// standbySocketGone notes that all copies went with their one socket, those of families and those
// of native tables.
func (d *Daemon) standbySocketGone(ctx context.Context, st *state, err error) {
	for f, fs := range st.families {
		if fs.standby.has() {
			d.standbyFailed(ctx, f, &fs.standby, err)
		}
	}
	for id, s := range st.native.standby {
		if s.has() {
			d.nativeStandbyFailed(ctx, id, s, err)
		}
	}
}

// standbyIdle returns why the family needs no standby; "" if it needs one. One that is there stays
// until a replay is estimated to take half of standbyFrom: its size may go up and down.
func (d *Daemon) standbyIdle(st *state, g rules.Generation, f rules.Family) string {
	if !g.Rewrites(f) {
		return "no protected rule translates"
	}
	least := standbyFrom
	if st.families[f].standby.has() {
		least /= 2
	}
	if count, _ := g.Counts(); d.cfg.Standby.Auto && st.pace.Estimate(count) < least {
		return "a replay is short enough without"
	}
	return ""
}

// takeCopy takes up what became of one family's copy.
func (d *Daemon) takeCopy(ctx context.Context, f rules.Family, s *standbyOf, nat StandbyNat, copied StandbyCopy) {
	switch {
	case errors.Is(copied.Err, ErrStandbyMoved):
		s.basis, s.moved = standbyBasis{}, nat.Digest
		return
	case errors.Is(copied.Err, ErrStandbyUnread) && (s.has() || s.begun):
		if s.making.failed(copied.Err, standby.ErrKernel, standby.ErrTaken) {
			severity.Warnings(klog.FromContext(ctx)).Info("The standby stays as it was: nat could not be read", "family", f, "reason", copied.Err)
		}
		return
	case copied.Err != nil:
		d.standbyFailed(ctx, f, s, copied.Err)
		return
	}
	s.making.trouble.over()
	current := standbyLag{checked: true, edition: s.basis.edition}
	s.latest, s.latestLag = nat.Section, current
	if s.begun = copied.Unfinished; s.begun {
		s.state, s.reason, s.pieceAt = api.StandbyBuilding, "", time.Now().Add(pieceRest)
		return
	}
	if s.unkept = !nat.Write; s.unkept {
		return
	}
	had := s.has()
	s.copy, s.state, s.reason, s.making = copied, api.StandbyArmed, "", s.making.over()
	s.section, s.lag, s.counted, s.written = nat.Section, current, -1, time.Now()
	if !had {
		klog.FromContext(ctx).Info("The standby is ready to translate while nat rules are missing",
			"family", f, "table", standby.TableName, "chains", copied.Chains, "uncopied", copied.Uncopied)
	}
}

// standbyFailed notes a try that failed, and plans the next one.
func (d *Daemon) standbyFailed(ctx context.Context, f rules.Family, s *standbyOf, err error) {
	s.state, s.reason, s.copy, s.written, s.unkept = api.StandbyUnavailable, err.Error(), StandbyCopy{}, time.Time{}, false
	s.begun = false
	if s.making.failed(err, standby.ErrKernel, standby.ErrTaken) {
		severity.Notices(klog.FromContext(ctx)).Info("There is no standby: while nat rules are missing, new connections are not translated; nothing else depends on it",
			"family", f, "reason", err)
	}
}

// releaseStandby deletes the family's copy, if there is one.
func (d *Daemon) releaseStandby(ctx context.Context, st *state, f rules.Family, s *standbyOf, into api.StandbyState, why string) {
	if s.has() || s.begun || s.state == api.StandbyUnavailable {
		if err := d.cfg.Standby.Table.Release(f.Table(rules.Nat)); err != nil {
			if s.making.stays(err) {
				severity.Warnings(klog.FromContext(ctx)).Error(err, "The standby's table stays for now", "family", f, "table", standby.TableName)
			}
			return
		}
		if s.has() || s.begun {
			klog.FromContext(ctx).Info("The standby's table is deleted", "family", f, "table", standby.TableName, "because", why)
		}
	}
	if s.gate.isOpen() {
		d.gateShut(st, f, s, time.Now())
	}
	*s = standbyOf{state: into, reason: why, basis: s.basis, making: s.making.over()}
}

// stopStandby deletes the copies after a cleanup.
func (d *Daemon) stopStandby(ctx context.Context, st *state) {
	if !d.hasStandby() {
		return
	}
	for f, fs := range st.families {
		d.releaseStandby(ctx, st, f, &fs.standby, api.StandbyOff, "canaryd's marks were removed on request")
	}
}

// standbys returns the standbys' states as a Status has them.
func (d *Daemon) standbys(st *state) map[rules.Family]api.FamilyStandby {
	all := map[rules.Family]api.FamilyStandby{}
	for f, fs := range st.families {
		s := &fs.standby
		all[f] = api.FamilyStandby{State: s.state, Reason: s.reason, OpenSince: s.gate.opened,
			Chains: s.copy.Chains, Uncopied: s.copy.Uncopied}
		switch {
		case !d.hasStandby():
			all[f] = api.FamilyStandby{State: api.StandbyOff, Reason: d.cfg.Standby.Off}
		case s.state == "": // nothing is decided yet
			all[f] = api.FamilyStandby{State: api.StandbyBuilding}
		case s.has():
			now := all[f]
			if now.Outstanding = s.behind(st.want()[f.Table(rules.Nat)], st.generation.edition); now.Outstanding > 0 && now.State == api.StandbyArmed {
				now.State = api.StandbyBehind
			}
			all[f] = now
		}
	}
	return all
}
