package standby

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A table is one copy in the kernel.
type table struct {
	id    tableid.TableID
	name  string
	held  *Copy // the kernel's copy, without rules
	gated bool
	open  map[Hook]bool
	// handles has the handles of the rules of large chains.
	handles map[string][]uint64
	// shutting: a transaction under way shuts hooks, so no knock may open one meanwhile.
	shutting bool
	bytes    int
	took     time.Duration
}

// openHooks returns the open hooks, in the packets' order, as canaryd knows them: a hook behind
// a gate may have expired. A nil table has none.
func (t *table) openHooks() (open []Hook) {
	if t == nil {
		return nil
	}
	return slices.DeleteFunc(Hooks(), func(h Hook) bool { return !t.open[h] })
}

// comment is the table's comment in `nft list ruleset`.
const comment = "made by canaryd, gone with it: translates while lost nat rules are put back"

// make makes the empty table for build, in a transaction of its own. The error is ErrKernel if
// the kernel knows no owners of tables, and ErrTaken if another process has the table.
func (s *Standby) make(t *table) error {
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Excl, t.id.Family)
	b.Text(unix.NFTA_TABLE_NAME, t.name)
	b.Number(unix.NFTA_TABLE_FLAGS, tableOwned)
	b.Blob(tableUserdata, append(append([]byte{0, byte(len(comment) + 1)}, comment...), 0))
	b.End()
	err := s.send(t, b)
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: its tables have no owner before Linux 5.12 (%w)", ErrKernel, err)
	case errors.Is(err, nft.ErrPermission):
		// The kernel also returns EPERM if another process owns the table.
		if _, found, asked := s.conn.Table(t.id.Family, t.name); asked == nil && found {
			return fmt.Errorf("%w (table %s)", ErrTaken, t.name)
		}
	}
	return err
}

// remove deletes the table, which takes no copy any more, even if that fails. If the kernel
// refuses and a hook is open, the socket is closed; else the table is left until the next try.
// A table that is gone already is no error. The caller has locked s.
func (s *Standby) remove(t *table) error {
	delete(s.tables, t.id)
	delete(s.left, t.id)
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_DELTABLE, 0, t.id.Family)
	b.Text(unix.NFTA_TABLE_NAME, t.name)
	b.End()
	err := s.send(t, b)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil && len(t.open) > 0:
		return errors.Join(err, s.close())
	case err != nil:
		s.left[t.id] = t
	}
	return err
}

// hold notes the copy that the kernel has now, for the next difference, without the rules of its
// chains.
func (t *table) hold(c *Copy) {
	held := *c
	held.rules = nil
	t.held = &held
}

// shutRemoved notes that hooks are shut because a writer removed their base chains. follow and
// open call it after the transaction; open then adds the hooks that it opened.
func (t *table) shutRemoved(w *writer) {
	for _, h := range w.removed {
		delete(t.open, h)
	}
}

// follow writes the difference between the kernel's copy of nat and c, for PutPiece. If only a
// part was written before an error, it removes the table. The caller has locked s.
func (s *Standby) follow(t *table, c *Copy) error {
	t.bytes, t.took = 0, 0
	w := &writer{s: s, t: t, next: c}
	err := w.write()
	t.took, t.bytes = w.took, w.bytes
	switch {
	case err == nil:
		t.shutRemoved(w)
		t.hold(c)
		s.readHandles(t)
	case w.sent > 0: // the table is a mixture of two copies
		return errors.Join(err, s.remove(t))
	}
	return err
}

// open opens hooks in one transaction, with all changes of pending; nil: no changes. Open calls
// it if it cannot knock. After an error nothing has changed. The caller has locked s.
func (s *Standby) open(t *table, hooks []Hook, pending *Copy) error {
	w := &writer{s: s, t: t, next: pending, whole: true, opens: hooks}
	if pending == nil {
		w.next = t.held
	}
	if err := w.write(); err != nil {
		return err
	}
	t.shutRemoved(w)
	t.opened(hooks, w.next)
	if pending != nil {
		t.hold(pending) // handles are read after the next change: opening is not the time
	}
	return nil
}

// errNoKnock reports that a table's hooks cannot be opened by knocking now.
var errNoKnock = errors.New("no rule would see a knock")

// openByKnock opens hooks without a transaction, for Open without a pending change. Another
// transaction of the table may be under way. The error is errNoKnock if nothing was tried. After
// another one some hooks may be open, and Open needs a transaction.
func (s *Standby) openByKnock(id tableid.TableID, hooks []Hook) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tables[id]
	if t == nil || !t.gated || t.held.hooks[Output] == nil || t.shutting {
		return errNoKnock
	}
	hooks = t.closed(hooks)
	if err := s.knock(t, hooks); err != nil {
		return err
	}
	t.opened(hooks, t.held)
	return nil
}

// closed returns those of the hooks that the copy has and that are not open, for Open.
func (t *table) closed(hooks []Hook) []Hook {
	return slices.DeleteFunc(slices.Clone(hooks), func(h Hook) bool { return t.held.hooks[h] == nil || t.open[h] })
}

// opened notes in t.open which hooks may be open. It is called after each way to open a gate: by
// a transaction, or by a datagram that opens the hook (openByKnock); also after a failure
// halfway. c is the copy that the kernel has then. A hook without a base chain in c stays shut.
func (t *table) opened(hooks []Hook, c *Copy) {
	for _, h := range hooks {
		if c.hooks[h] != nil {
			t.open[h] = true
		}
	}
}

// shutOrRemove shuts open hooks, or removes the table, so that no hook stays open. Shut calls
// it, and Open for hooks that a knock may have opened. The caller has locked s.
func (s *Standby) shutOrRemove(t *table, hooks []Hook) error {
	if err := s.shut(t, hooks); err != nil {
		return errors.Join(err, s.remove(t))
	}
	return nil
}

// shut shuts open hooks in one transaction: it empties their gates or, without gates, their
// base chains. shutOrRemove removes the table after an error. The caller has locked s.
func (s *Standby) shut(t *table, hooks []Hook) error {
	t.shutting = true
	defer func() { t.shutting = false }()
	b := nft.NewBatch()
	for _, h := range hooks {
		if t.gated {
			noElement(b, t, h)
		} else {
			emptyChain(b, t, t.held.hooks[h].name)
		}
	}
	if err := s.send(t, b); err != nil {
		return err
	}
	maps.DeleteFunc(t.open, func(h Hook, _ bool) bool { return slices.Contains(hooks, h) })
	return nil
}
