package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Mirror holds the chains and rules of tables, and keeps up with the kernel at a cost in
// proportion to what changes: notifications say what changed, and which chains to read again where
// that cannot be applied to what the mirror holds.
//
// A read is accepted when every notification up to the kernel's present genid was received and
// no chain that one of them named has yet to be read: then no commit came in between, and the
// state is exactly that of this genid, however long ago each chain was read. The kernel raises
// the genid, makes a commit visible, and only then sends its notifications (nf_tables_commit),
// so that none can hide. Unlike a read between two equal genids this comes to an end while
// another process keeps writing: what must fit between two of its commits is only what it
// changed.
//
// All methods but Turn and Silently are for the goroutine that has the turn.
type Mirror struct {
	conn   *Conn
	cfg    MirrorConfig
	turn   chan struct{} // of capacity 1
	events *Events       // nil before the first read and after an overflow
	at     uint32        // the genid of the last commit that was taken in
	parts  []*FamilyMirror
}

// A MirrorConfig says how a Mirror asks and whom it calls.
type MirrorConfig struct {
	Genid func() (uint32, error)      // asks for the kernel's; at least twice a read
	Own   func(port, pid uint32) bool // whether a commit is the user's own
	// Begun is called when the mirror begins to receive notifications, of what comes after
	// genid, and Heard with each of them. Both may be nil.
	Begun func(genid uint32)
	Heard func(Event)
}

// NewMirror returns a Mirror of nothing; Add says of what. It reads over conn.
func NewMirror(conn *Conn, cfg MirrorConfig) *Mirror {
	if cfg.Begun == nil {
		cfg.Begun = func(uint32) {}
	}
	if cfg.Heard == nil {
		cfg.Heard = func(Event) {}
	}
	return &Mirror{conn: conn, cfg: cfg, turn: make(chan struct{}, 1)}
}

// Add lets the mirror hold these tables, too. The first read has to come after it.
func (m *Mirror) Add(cfg FamilyConfig) *FamilyMirror {
	if cfg.Budget == nil {
		cfg.Budget = unlimited{}
	}
	if cfg.View == nil {
		cfg.View = blind{}
	}
	f := &FamilyMirror{cfg: cfg, conn: m.conn, dirty: map[Place]bool{}}
	m.parts = append(m.parts, f)
	return f
}

// Close ends the mirror.
func (m *Mirror) Close() error {
	if m.events == nil {
		return nil
	}
	return m.events.Close()
}

// Turn waits for the turn, which ends with the call of done.
func (m *Mirror) Turn(ctx context.Context) (done func(), err error) {
	select {
	case m.turn <- struct{}{}:
		return func() { <-m.turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for another read of the tables: %w", ctx.Err())
	}
}

// Read brings one part up to date and returns the genid at which it stands.
func (m *Mirror) Read(ctx context.Context, f *FamilyMirror) (genid uint32, err error) {
	f.countAgain(time.Now())
	for {
		if err := ctx.Err(); err != nil {
			return 0, fmt.Errorf("the %v tables changed all the time while they were read: %w", f.cfg.Family, err)
		}
		genid, heard, err := m.Listen()
		if err != nil {
			return 0, err
		}
		f.rereadWritten()
		if heard && !f.stale && !f.Dirty() {
			return genid, nil
		}
		if err := m.refresh(ctx, f); err != nil {
			return 0, err
		}
	}
}

// refresh reads what has to be read of a part. A commit up to the genid that is asked for after
// that may be in it.
func (m *Mirror) refresh(ctx context.Context, f *FamilyMirror) error {
	if !f.stale && !f.Dirty() {
		return f.refresh(ctx)
	}
	read, all := map[string]bool{}, f.lists()
	for place := range f.dirty {
		read[place.Table] = true
	}
	err := f.refresh(ctx)
	upTo, asked := m.cfg.Genid()
	if asked != nil {
		f.ForgetAll()
	}
	for name, t := range f.tables {
		if all || read[name] {
			t.upTo = upTo
		}
	}
	return errors.Join(err, asked)
}

// mirrorPatience is how long notifications are waited for at a time. Those of a commit of 40,000
// rules come up to a second after it became visible.
const mirrorPatience = 100 * time.Millisecond

// Listen takes in the notifications that came, and reports whether those are all up to the present
// genid.
func (m *Mirror) Listen() (genid uint32, heard bool, err error) {
	if m.events == nil {
		if m.events, err = OpenEvents(m.cfg.Genid, m.cfg.Own); err != nil {
			m.events = nil
			return 0, false, err
		}
		m.at = m.events.UpTo()
		m.cfg.Begun(m.at)
		for _, f := range m.parts {
			f.ForgetAll()
		}
	}
	if genid, err = m.cfg.Genid(); err != nil {
		return 0, false, err
	}
	heard, err = m.events.Wait(genid, time.Now().Add(mirrorPatience), m.take)
	if err == nil {
		for _, f := range m.parts {
			f.settle()
		}
		if heard && Newer(m.at, genid) {
			genid = m.at // more was committed, and heard, since the question
		}
		return genid, heard, nil
	}
	// An overflow, or a message that cannot be read: what it said is lost.
	lost := m.events
	m.events = nil
	if errors.Is(err, unix.ENOBUFS) {
		m.salvage(lost)
	}
	if cerr := lost.Close(); cerr != nil || !errors.Is(err, unix.ENOBUFS) {
		return 0, false, errors.Join(err, cerr)
	}
	return genid, false, nil
}

// salvage takes in the commits that were heard whole before notifications were dropped. These wait
// in their order, and the kernel adds none until all were received (netlink_overrun and
// netlink_rcv_wake, Linux 6.18); from then on the socket hears nothing any more. So the commit of
// which some are missing has no end, and is not taken in.
func (m *Mirror) salvage(lost *Events) {
	if lost.Leave() == nil {
		_ = lost.Drain(m.take) // an error ends it
	}
	for _, f := range m.parts {
		f.miss(m.at)
	}
}

// take takes in one notification.
func (m *Mirror) take(e Event) {
	if e.Kind == unix.NFT_MSG_NEWGEN {
		for _, f := range m.parts {
			f.end(e.By, m.at)
		}
		m.at = e.By.Genid
	}
	m.cfg.Heard(e)
	if e.Kind == unix.NFT_MSG_NEWGEN {
		return
	}
	table := commonName(e.Table)
	for _, f := range m.parts {
		if f.cfg.Family == e.Family && f.cfg.Tables(table) {
			f.take(e, table)
		}
	}
}

// A Rewrite names chains of one family that a transaction of the user's writes.
type Rewrite struct {
	Family tableid.Family
	Place  Place
}

// Silently calls write while neither the mirror nor others listen: the kernel sends a notification
// of each rule to each listener, in messages as large as those of a dump. write sends one
// transaction that has content and changes nothing but the chains in written. Nothing is lost by
// that: the genid says afterwards whether another process committed meanwhile. If so, the mirror
// reads everything again, and others get ErrOverflow.
func (m *Mirror) Silently(written []Rewrite, others []*Subscription, write func() error) error {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	default: // another goroutine reads, and is to hear of it
		return write()
	}
	before, heard, err := m.Listen()
	if err != nil || !heard || m.events.Leave() != nil {
		return write()
	}
	for _, s := range others {
		s.Leave()
	}
	failed := write()
	for _, s := range others {
		s.Join()
	}
	err = m.events.Join()
	// The genid is asked for when all listen again: what is committed from now on is heard.
	now, asked := m.cfg.Genid()
	switch err = errors.Join(err, asked); {
	case err == nil && now == before:
	case err == nil && failed == nil && now == Following(before):
		m.events.SkipTo(now)
		m.at = now
		for _, f := range m.parts {
			f.rewritten(written)
		}
	default:
		_ = m.events.Close() // its error would leave nothing to do
		m.events = nil
		for _, s := range others {
			s.Miss()
		}
	}
	return failed
}

// rewritten marks chains that the user wrote. Which chains there are is asked too: of new ones the
// handle is not known.
func (f *FamilyMirror) rewritten(written []Rewrite) {
	for _, w := range written {
		if w.Family == f.cfg.Family && f.cfg.Tables(w.Place.Table) {
			f.stale = true
			f.Reread(w.Place)
		}
	}
}

// held returns where the numbers of all rules are that chains have.
func (f *FamilyMirror) held() []*[]RuleID {
	var held []*[]RuleID
	for _, t := range f.tables {
		for _, c := range t.chains {
			held = append(held, &c.IDs)
		}
	}
	return slices.Clip(held)
}
