package nativestore

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A returning brings one native table to the content of a stored generation.
type returning struct {
	kernel Kernel
	store  *Store
	want   Generation
	uptime func() time.Duration
	base   *baseline.Base
}

// Return brings a table in the kernel to the content of a stored generation. A preview marks the
// rules that base does not have; base is nil without a baseline.
func (s *Store) Return(kernel Kernel, want Generation, uptime func() time.Duration, r api.RestoreRequest, base *baseline.Base) (Returned, error) {
	return returning{kernel, s, want, uptime, base}.do(r)
}

// ErrNotProtected means that --protect does not name the table.
var ErrNotProtected = errors.New("--protect does not name it")

// ErrTooLarge means that a table is left out, because all tables together are too large.
var ErrTooLarge = errors.New("it exists and is too large to be read: raise --max-rules and the memory limit")

// MayRestore returns why a stored generation must not be put into force here; nil if it may be.
// It is foreign, or protects does not name its table.
func (s *Store) MayRestore(g Generation, protects func(tableid.TableID) bool) error {
	if foreign := s.foreign(g.Identity); foreign != "" {
		return fmt.Errorf("generation %s of table %s: %s", g.ID, g.Name, foreign)
	}
	if !protects(g.Table.ID) {
		return fmt.Errorf("generation %s of table %s: %w", g.ID, g.Name, ErrNotProtected)
	}
	return nil
}

// A Returned is the result of a returning.
type Returned struct {
	Write
	Reply api.RestoreReply
	diff  api.TableDiff // between the old and the written content
	fresh int           // the first lines of diff that the baseline lacks
	Held  []native.Held // left out of the write
}

// Removal returns the flush record of the content of g's table that the restore removed; false
// if nothing was removed.
func (n Returned) Removal(g Generation, now time.Time) (onrequest.Removal, bool) {
	if !n.Wrote || n.Reply.Removes() == (api.Counts{}) {
		return onrequest.Removal{}, false
	}
	r, counts := onrequest.NewRemoval(n.Reply, now), n.Reply.Removes()
	r.Record.Lost = api.Lost{Rules: counts.Rules, Chains: counts.Chains, Elements: counts.Elements}
	r.Record.Native = []api.NativeLoss{{Family: g.Family, Table: g.Name, Kind: api.Removed, Why: "generation " + g.ID + " was restored on request",
		Rules: counts.Rules, Chains: counts.Chains, Elements: counts.Elements}}
	r.Diff = []api.TableDiff{n.diff}
	return r, true
}

// do puts the generation into force, or only previews the changes. The operator must have
// agreed to its removals, from exactly the present content. The old content is stored first, as
// the reply's Undo; if that fails, do removes nothing.
func (n returning) do(r api.RestoreRequest) (Returned, error) {
	for range Tries {
		seen, err := n.kernel.Capture(func(t nft.Table) bool { return t.Family.Table(t.Name) == n.want.Table.ID })
		if err != nil {
			return Returned{}, err
		}
		if _, left := seen.LeftOut[n.want.Table.ID]; left {
			return Returned{}, fmt.Errorf("table %s: %w", n.want.Name, ErrTooLarge)
		}
		now := seen.Tables[n.want.Table.ID]
		if now != nil && now.Immune() {
			return Returned{}, fmt.Errorf("table %s: %w", n.want.Name, native.ErrImmune)
		}
		done := n.preview(now)
		removal := done.Reply.Agreement()[n.want.Table.ID]
		switch {
		case r.DryRun:
			for i := range done.Reply.Changes {
				c := &done.Reply.Changes[i]
				c.Lines, c.More, c.NewLines = done.diff.Lines, done.diff.More, min(done.fresh, len(done.diff.Lines))
			}
			return done, nil
		case removal != "" && removal != r.Agreed[n.want.Table.ID]:
			done.Reply.Refused = fmt.Sprintf("%v: table %s", reload.ErrNotAgreed, n.want.Name)
			return done, nil
		case now != nil && len(native.Diff(now, n.want.Table)) == 0:
			done.Reply.Native[0].Outcome, done.Proof = reload.Skipped, seen
			return done, nil
		}
		undo, unkept := n.keepForUndo(now)
		if unkept != nil && removal != "" {
			return Returned{}, fmt.Errorf("the present content of table %s could not be kept for an undo, so nothing was written; make room in %s and run it again: %w",
				n.want.Name, n.store.folder(), unkept)
		}
		repairs := []native.Repair{n.repair(now)}
		w := writeAndProve(n.kernel, seen.Genid, repairs)
		if w.stale() {
			continue
		}
		row := w.row(repairs[0])
		if row.Outcome == reload.Proved && unkept != nil {
			row.Detail = fmt.Sprintf("the previous content could not be kept, so there is no undo: %v", unkept)
		}
		done.Reply.Undo, done.Reply.Native[0] = undo, row
		done.Write, done.Held = w, repairs[0].Held()
		return done, nil
	}
	return Returned{}, fmt.Errorf("restoring table %s, %d times: %w", n.want.Name, Tries, nft.ErrStale)
}

// preview describes the changes to the present table; nil means none exists. do shows it, and
// compares its removals with the operator's agreement.
func (n returning) preview(now *native.Table) Returned {
	id := n.want.Table.ID
	reply := api.RestoreReply{Generation: n.want.ID, Outcomes: map[rules.Family]api.Outcome{}, Native: []api.NativeRestored{Outcome(n.want.Table, "", nil)}}
	lost, got := native.Difference(now, n.want.Table)
	change := api.TableChange{Family: id.Family, Table: id.Name, Native: true, Adds: countLines(got), Removes: countLines(lost)}
	fresh, got, unconfirmed := n.base.Apart(n.want.Table, got)
	change.NotInBaseline = unconfirmed
	removes := len(lost) > 0
	for _, c := range native.Diff(now, n.want.Table) {
		if c.Kind == nft.Chains && c.Altered && c.Lost+c.New == 0 {
			change.Reorders++
		}
		removes = removes || now != nil && (c.Gone || c.Altered || c.Lost > 0)
	}
	if removes {
		change.Removal = removalOf(now, lost)
	}
	w := flushes.NewNativeDiffWriter(id, flushes.DiffRoom())
	w.Lines("+", fresh)
	w.Lines("-", lost)
	w.Lines("+", got)
	if len(lost)+len(fresh)+len(got)+change.Reorders > 0 {
		reply.Changes = []api.TableChange{change}
	}
	return Returned{Reply: reply, diff: w.Diff, fresh: len(fresh)}
}

// countLines counts the rules, chains and elements of a list for a reply.
func countLines(list []native.Line) (c api.Counts) {
	for _, l := range list {
		switch l.Kind {
		case nft.Rules:
			c.Rules++
		case nft.Chains:
			c.Chains++
		case nft.Elements:
			c.Elements++
		}
	}
	return c
}

// removalOf identifies the removed lines, and the content that they are removed from. An
// operator agrees to this text, so a removal from other content is refused.
func removalOf(now *native.Table, lost []native.Line) string {
	h := sha256.New()
	digest := now.Digest()
	h.Write(digest[:])
	for _, l := range lost {
		h.Write(append([]byte(l.Text), 0))
	}
	return hex.EncodeToString(h.Sum(nil))[:24]
}

// keepForUndo stores the present content before do removes it, and returns its ID for the
// reply's Undo; "" if there is no table.
func (n returning) keepForUndo(now *native.Table) (id string, err error) {
	if now == nil {
		return "", nil
	}
	g := GenerationOf(now, now.Digest(), reload.MadeByOwners, time.Now(), n.uptime())
	if err := n.store.put(g); err != nil {
		return "", err
	}
	return g.ID, nil
}

// repair returns the repair that brings the present table to the generation; nil means none
// exists.
func (n returning) repair(now *native.Table) native.Repair {
	remedy := native.ByReplace
	if now == nil {
		remedy = native.ByCreate
	}
	return native.Repair{Remedy: remedy, Want: n.want.Table, Now: now, Age: n.uptime() - n.want.Read}
}
