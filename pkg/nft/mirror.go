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

// A Mirror holds the chains and rules of tables, and follows the kernel at a cost
// in proportion to the changes. Notifications name the changes. Where a change
// does not fit the mirror's content, the mirror reads the chain again.
//
// A read is accepted if no notification up to the kernel's present genid is
// missing and each chain that they named was read. Then the state is exactly that
// genid's, however long ago each chain was read. The kernel raises the genid,
// makes a commit visible, and only then sends its notifications
// (nf_tables_commit), so no commit can hide. A read between two equal genids may
// never end while another process keeps writing. This read ends, because only the
// changed chains must be read between two commits.
// All methods but Turn and Silently are for the goroutine that has the turn.
type Mirror struct {
	conn   *Conn
	cfg    MirrorConfig
	turn   chan struct{} // of capacity 1
	events *Events       // nil before the first read and after an overflow
	at     uint32        // the genid of the last commit in the mirror
	parts  []*FamilyMirror
}

// A MirrorConfig has the functions that a Mirror calls.
type MirrorConfig struct {
	Genid func() (uint32, error)      // returns the kernel's genid; called at least twice a read
	Own   func(port, pid uint32) bool // whether a commit is the user's own
	Muted func() uint32               // see OpenEvents
	// The mirror calls Begun when it begins to receive the notifications after
	// genid, and Heard with each of them. Both may be nil.
	Begun func(genid uint32)
	Heard func(Event)
}

// NewMirror returns a Mirror without tables, for use with Add. It reads over conn.
// pkg/iptables makes one for each Kernel of the nft backend.
func NewMirror(conn *Conn, cfg MirrorConfig) *Mirror {
	if cfg.Begun == nil {
		cfg.Begun = func(uint32) {}
	}
	if cfg.Heard == nil {
		cfg.Heard = func(Event) {}
	}
	return &Mirror{conn: conn, cfg: cfg, turn: make(chan struct{}, 1)}
}

// Add lets the mirror hold the tables of one more family. It must precede the first read. In
// cfg, a nil Budget means no limit.
func (m *Mirror) Add(cfg FamilyConfig) *FamilyMirror {
	if cfg.Budget == nil {
		cfg.Budget = NewBudget[Place](0, nil)
	}
	if cfg.View == nil {
		cfg.View = blind{}
	}
	f := &FamilyMirror{cfg: cfg, conn: m.conn, dirty: map[Place]bool{}}
	m.parts = append(m.parts, f)
	return f
}

// Close ends the reception of notifications. The connection stays open: it belongs to the
// caller of NewMirror.
func (m *Mirror) Close() error {
	if m.events == nil {
		return nil
	}
	return m.events.Close()
}

// Turn waits for the turn, which lasts until done is called. Read and Listen need it. The
// error is ctx's, which ended while another read had the turn.
func (m *Mirror) Turn(ctx context.Context) (done func(), err error) {
	select {
	case m.turn <- struct{}{}:
		return func() { <-m.turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for another read of the tables: %w", ctx.Err())
	}
}

// Read brings one family up to date and returns the genid of its state. The caller has the
// turn. While commits interrupt, Read begins again, until ctx ends.
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

// refresh reads the changed chains of a family, for Read. The result may contain commits up
// to the genid that refresh reads afterwards (mirrorTable.upTo).
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

// mirrorPatience limits one wait for notifications. The notifications of a commit
// of 40,000 rules arrive up to a second after it became visible.
const mirrorPatience = 100 * time.Millisecond

// Listen applies the notifications that arrived. heard says that they are complete up to
// genid, the present one. If false, the mirror may lag, and Read reads. An overflow is no
// error: the next Listen subscribes again. The caller has the turn.
func (m *Mirror) Listen() (genid uint32, heard bool, err error) {
	if m.events == nil {
		if m.events, err = OpenEvents(m.cfg.Genid, m.cfg.Own, m.cfg.Muted); err != nil {
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
			genid = m.at // more was committed, and received, since the question
		}
		return genid, heard, nil
	}
	// An overflow or an unreadable message means lost notifications.
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

// salvage applies the complete commits that arrived before notifications were
// dropped. These wait in their order. The kernel adds no message until all were
// received (netlink_overrun and netlink_rcv_wake, Linux 6.18), and after Leave
// the socket receives none. So a commit with a gap has no end, and is not
// applied.
func (m *Mirror) salvage(lost *Events) {
	if lost.Leave() == nil {
		_ = lost.Drain(m.take) // an error ends it
	}
	for _, f := range m.parts {
		f.miss(m.at)
	}
}

// take handles one notification for Listen. A NEWGEN ends a commit, which take has each
// family apply. Any other notification it hands to the family that holds the table.
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

// A Rewrite names a chain that the user's transaction writes.
type Rewrite struct {
	Family tableid.Family
	Place  Place
}

// Silently calls write while neither the mirror nor others listen. The kernel
// notifies each listener of each rule, in messages as large as a dump's.
// write sends one non-empty transaction that changes only the chains in written.
// No change of another process is lost: the genid reveals a commit meanwhile.
// Then the mirror reads everything again, and others get ErrOverflow.
func (m *Mirror) Silently(written []Rewrite, others []*Subscription, write func() error) error {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	default: // another goroutine reads, and must be notified
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
	// The genid is read when all listen again, so every later commit is received.
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
		_ = m.events.Close() // no action could follow its error
		m.events = nil
		for _, s := range others {
			s.Miss()
		}
	}
	return failed
}

// rewritten marks chains that the user wrote while the mirror did not listen (Silently). The
// mirror also lists the chains, because it does not know the handles of new ones.
func (f *FamilyMirror) rewritten(written []Rewrite) {
	for _, w := range written {
		if w.Family == f.cfg.Family && f.cfg.Tables(w.Place.Table) {
			f.stale = true
			f.Reread(w.Place)
		}
	}
}

// held returns pointers to the rule numbers of all chains. trim hands them to Purge, which
// keeps these rules and renumbers them.
func (f *FamilyMirror) held() []*[]RuleID {
	var held []*[]RuleID
	for _, t := range f.tables {
		for _, c := range t.chains {
			held = append(held, &c.IDs)
		}
	}
	return slices.Clip(held)
}
