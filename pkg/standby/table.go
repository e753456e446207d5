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
	held  *Copy // what the kernel holds; its chains have no rules, only digests
	gated bool
	open  map[Hook]bool
	// handles are those of the rules of large chains.
	handles map[string][]uint64
	bytes   int
	took    time.Duration
}

// openHooks returns the hooks that are open, in the packets' order; of no table there are none.
func (t *table) openHooks() (open []Hook) {
	if t == nil {
		return nil
	}
	return slices.DeleteFunc(Hooks(), func(h Hook) bool { return !t.open[h] })
}

// comment is what `nft list ruleset` shows of the table's purpose.
const comment = "made by canaryd, gone with it: translates while lost nat rules are put back"

// make makes the empty table, in a transaction of its own.
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
		// EPERM is also the answer if another process owns the table.
		if _, found, asked := s.conn.Table(t.id.Family, t.name); asked == nil && found {
			return fmt.Errorf("%w (table %s)", ErrTaken, t.name)
		}
	}
	return err
}

// remove deletes the table, which takes no copy any more whatever comes of it. If the kernel
// refuses and a hook is open, the socket is closed; else the table is left until the next try. s.mu
// must be held.
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

// hold notes what the kernel holds now.
func (t *table) hold(c *Copy) {
	held := *c
	held.chains = make(map[string]*chain, len(c.chains))
	for name, of := range c.chains {
		if of.rules != nil {
			bare := *of
			bare.rules = nil
			of = &bare
		}
		held.chains[name] = of
	}
	t.held = &held
}

// shutRemoved notes that hooks are shut whose base chains a writer removed.
func (t *table) shutRemoved(w *writer) {
	for _, h := range w.removed {
		delete(t.open, h)
	}
}

// follow writes what is another. s.mu must be held.
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

// open opens hooks in one transaction, with all that pending has. s.mu must be held.
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

// openByKnock opens hooks without a transaction, or with one if no rule sees the knock. s.mu must
// be held.
func (s *Standby) openByKnock(t *table, hooks []Hook) error {
	hooks = slices.DeleteFunc(slices.Clone(hooks), func(h Hook) bool { return t.held.hooks[h] == nil || t.open[h] })
	knocked := s.knock(t, hooks)
	if knocked == nil {
		t.opened(hooks, t.held)
		return nil
	}
	err := s.open(t, hooks, nil)
	if err == nil {
		return nil
	}
	t.opened(hooks, t.held) // some may be
	return errors.Join(err, knocked, s.shutOrRemove(t, hooks))
}

// opened notes that the kernel has opened those of the hooks that the copy has.
func (t *table) opened(hooks []Hook, c *Copy) {
	for _, h := range hooks {
		if c.hooks[h] != nil {
			t.open[h] = true
		}
	}
}

// shutOrRemove shuts hooks that are open, or takes the table away, so that none of them stays so.
// s.mu must be held.
func (s *Standby) shutOrRemove(t *table, hooks []Hook) error {
	if err := s.shut(t, hooks); err != nil {
		return errors.Join(err, s.remove(t))
	}
	return nil
}

// shut shuts hooks that are open. s.mu must be held.
func (s *Standby) shut(t *table, hooks []Hook) error {
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
