package daemon

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A nativeReturn makes one native table what a stored generation of it holds.
type nativeReturn struct {
	kernel NativeKernel
	store  *NativeStore
	want   nativeGeneration
	uptime func() time.Duration
}

// errNotProtected: --protect does not name the table.
var errNotProtected = errors.New("--protect does not name it")

// mayRestore returns why a stored generation must not be put into force here; nil if it may be.
func (s *NativeStore) mayRestore(g nativeGeneration, protects func(tableid.TableID) bool) error {
	if foreign := s.foreign(g.Identity); foreign != "" {
		return fmt.Errorf("generation %s of table %s: %s", g.ID, g.Name, foreign)
	}
	if !protects(g.Table.ID) {
		return fmt.Errorf("generation %s of table %s: %w", g.ID, g.Name, errNotProtected)
	}
	return nil
}

// A nativeReturned is what became of a nativeReturn.
type nativeReturned struct {
	nativeWrite
	reply api.RestoreReply
	diff  api.TableDiff // of what stood and what was written
	held  []native.Held // left out of the write
}

// removal is the record of what was taken away; false if that is nothing.
func (n nativeReturned) removal(g nativeGeneration, now time.Time) (onrequest.Removal, bool) {
	if !n.wrote || n.reply.Removes() == (api.Counts{}) {
		return onrequest.Removal{}, false
	}
	r, counts := onrequest.NewRemoval(n.reply, now), n.reply.Removes()
	r.Record.Lost = api.Lost{Rules: counts.Rules, Chains: counts.Chains, Elements: counts.Elements}
	r.Record.Native = []api.NativeLoss{{Family: g.Family, Table: g.Name, Kind: api.Removed, Why: "generation " + g.ID + " was restored on request",
		Rules: counts.Rules, Chains: counts.Chains, Elements: counts.Elements}}
	r.Diff = []api.TableDiff{n.diff}
	return r, true
}

// do puts the generation into force, or only says what that would change. What it takes away must
// be agreed to, by the very content that stands. What stood is kept, and is the reply's Undo: if it
// cannot be kept, nothing is taken away.
func (n nativeReturn) do(r api.RestoreRequest) (nativeReturned, error) {
	for range nativeStale {
		seen, err := n.kernel.Capture(func(t nft.Table) bool { return t.Family.Table(t.Name) == n.want.Table.ID })
		if err != nil {
			return nativeReturned{}, err
		}
		now := seen.Tables[n.want.Table.ID]
		if now != nil && now.Immune() {
			return nativeReturned{}, fmt.Errorf("table %s: %w", n.want.Name, native.ErrImmune)
		}
		done := n.preview(now)
		removal := done.reply.Agreement()[n.want.Table.ID]
		switch {
		case r.DryRun:
			for i := range done.reply.Changes {
				done.reply.Changes[i].Lines, done.reply.Changes[i].More = done.diff.Lines, done.diff.More
			}
			return done, nil
		case removal != "" && removal != r.Agreed[n.want.Table.ID]:
			done.reply.Refused = fmt.Sprintf("%v: table %s", reload.ErrNotAgreed, n.want.Name)
			return done, nil
		case now != nil && len(native.Diff(now, n.want.Table)) == 0:
			done.reply.Native[0].Outcome, done.proof = reload.Skipped, seen
			return done, nil
		}
		undo, unkept := n.keepForUndo(now)
		if unkept != nil && removal != "" {
			return nativeReturned{}, fmt.Errorf("what table %s holds now could not be kept for an undo, so nothing was written; make room in %s and run it again: %w",
				n.want.Name, n.store.folder(), unkept)
		}
		repairs := []native.Repair{n.repair(now)}
		w := writeAndProve(n.kernel, seen.Genid, repairs)
		if w.stale() {
			continue
		}
		row := w.row(repairs[0])
		if row.Outcome == reload.Proved && unkept != nil {
			row.Detail = fmt.Sprintf("what stood before could not be kept, and there is no undo: %v", unkept)
		}
		done.reply.Undo, done.reply.Native[0] = undo, row
		done.nativeWrite, done.held = w, repairs[0].Held()
		return done, nil
	}
	return nativeReturned{}, fmt.Errorf("restoring table %s, %d times: %w", n.want.Name, nativeStale, nft.ErrStale)
}

// preview says what becomes of the table that stands; nil is none.
func (n nativeReturn) preview(now *native.Table) nativeReturned {
	id := n.want.Table.ID
	reply := api.RestoreReply{Generation: n.want.ID, Outcomes: map[rules.Family]api.Outcome{}, Native: []api.NativeRestored{nativeOutcome(n.want.Table, "", nil)}}
	lost, got := native.Difference(now, n.want.Table)
	change := api.TableChange{Family: id.Family, Table: id.Name, Native: true, Adds: countLines(got), Removes: countLines(lost)}
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
	w.Lines("-", lost)
	w.Lines("+", got)
	if len(lost)+len(got)+change.Reorders > 0 {
		reply.Changes = []api.TableChange{change}
	}
	return nativeReturned{reply: reply, diff: w.Diff}
}

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

// removalOf identifies what is taken away, and the content from which it is.
func removalOf(now *native.Table, lost []native.Line) string {
	h := sha256.New()
	digest := now.Digest()
	h.Write(digest[:])
	for _, l := range lost {
		h.Write(append([]byte(l.Text), 0))
	}
	return hex.EncodeToString(h.Sum(nil))[:24]
}

// keepForUndo has what stands on disk, and returns its ID; "" if nothing stands.
func (n nativeReturn) keepForUndo(now *native.Table) (id string, err error) {
	if now == nil {
		return "", nil
	}
	g := generationOf(now, now.Digest(), reload.MadeByOwners, time.Now(), n.uptime())
	if err := n.store.put(g); err != nil {
		return "", err
	}
	return g.ID, nil
}

// repair returns what makes the generation of the table that stands; nil is none.
func (n nativeReturn) repair(now *native.Table) native.Repair {
	remedy := native.ByReplace
	if now == nil {
		remedy = native.ByCreate
	}
	return native.Repair{Remedy: remedy, Want: n.want.Table, Now: now, Age: n.uptime() - n.want.Read}
}

// nativeGeneration returns the stored generation of a native table of that ID; found is false if
// there is none, and then an ID is perhaps that of iptables' rules.
func (d *Daemon) nativeGeneration(id string) (g nativeGeneration, found bool, err error) {
	if !d.guardsNative() || d.cfg.Native.Store == nil {
		return nativeGeneration{}, false, nil
	}
	g, err = d.cfg.Native.Store.read(id)
	if errors.Is(err, reload.ErrNothingStored) {
		return nativeGeneration{}, false, nil
	}
	return g, true, err
}

// returnNative makes a native table what a stored generation of it holds, because an operator asks
// for it. From then on that is what ought to be in force.
func (d *Daemon) returnNative(ctx context.Context, st *state, r api.RestoreRequest, g nativeGeneration) (api.RestoreReply, error) {
	if err := d.cfg.Native.Store.mayRestore(g, d.cfg.Native.Protects); err != nil {
		return api.RestoreReply{}, err
	}
	ctx, finished := finishing(ctx)
	defer finished()
	if !r.DryRun {
		d.nativeByItself(ctx, st)
	}
	if st.native.asleep {
		if _, err := d.awaken(st, nil); err != nil {
			return api.RestoreReply{}, err
		}
	}
	done, err := nativeReturn{d.cfg.Native.Kernel, d.cfg.Native.Store, g, d.cfg.Uptime}.do(r)
	reply := done.reply
	if err != nil || done.proof == nil && !done.wrote {
		return reply, err
	}
	if gone, any := done.removal(g, time.Now()); any {
		d.takeRemoval(ctx, st, gone, reply)
	}
	known := done.proved()
	if known {
		if err := d.hearNative(ctx, st, done.proof.Genid); err != nil {
			known = false
			d.nativeUnknown(ctx, st, err)
		}
	}
	if done.wrote && done.proved() {
		onrequest.LogRestored(ctx, reply, "table", g.Name, "detail", reply.Native[0].Detail)
	}
	if known {
		d.adoptReturned(ctx, st, g.Table.ID, done)
		d.endBack(ctx, st, nil)
	} else {
		st.native.readLater(g.Table.ID, time.Now())
	}
	st.native.planReads(time.Now())
	d.witnessesDue(st)
	return reply, nil
}

// readLater has the next read judge what stands in place of a table, of which no commit may speak.
func (r *nativeRealm) readLater(id tableid.TableID, now time.Time) {
	if t := r.tables[id]; t != nil {
		t.touch(now, now, true)
	} else {
		r.fresh = true
	}
}

// adoptReturned makes what a read showed of a restored table what ought to be in force.
func (d *Daemon) adoptReturned(ctx context.Context, st *state, id tableid.TableID, done nativeReturned) {
	r, seen := &st.native, nativeSight{Ruleset: done.proof}
	if t := r.tables[id]; t != nil && done.wrote {
		d.hold(st, t, nil) // the operator has decided
	}
	if t := r.tables[id]; t != nil {
		_, known := seen.Tables[id].Policies()
		t.policies = policies{known: known}
	}
	if r.tables[id] == nil {
		r.tables[id] = &nativeTable{}
		d.adopt(ctx, st, seen.learned(id))
	} else {
		d.adoptNative(ctx, st, id, seen, native.Finding{Verdict: native.Intact, Why: "an operator restored it"})
	}
	if done.wrote {
		r.tables[id].made = reload.MadeRestored
		logHeld(ctx, id, done.held)
		d.hold(st, r.tables[id], lasting(done.held))
	}
	r.disk.changed(time.Now())
}

// RestoreGeneration makes, without a daemon, a native table what its stored generation of that ID
// holds. found is false if there is no such generation. A nil kernel is one without nf_tables.
func (s *NativeStore) RestoreGeneration(ctx context.Context, kernel NativeKernel, protects func(tableid.TableID) bool, r api.RestoreRequest) (reply api.RestoreReply, found bool, err error) {
	g, err := s.read(r.Generation)
	if errors.Is(err, reload.ErrNothingStored) {
		return api.RestoreReply{}, false, nil
	}
	if err == nil {
		err = s.mayRestore(g, protects)
	}
	if err != nil {
		return api.RestoreReply{}, true, err
	}
	if kernel == nil {
		return api.RestoreReply{}, true, errNoNFTables
	}
	done, err := nativeReturn{kernel, s, g, here.Uptime}.do(r)
	if err != nil {
		return done.reply, true, err
	}
	if gone, any := done.removal(g, time.Now()); any {
		err = gone.Keep(ctx, filepath.Dir(s.path), done.reply)
	}
	if !done.proved() {
		return done.reply, true, err
	}
	stored, loadErr := s.load()
	if len(stored.unread) > 0 && !slices.ContainsFunc(stored.unread, func(u reload.Unread) bool { return u.Table != g.Name }) {
		loadErr = nil // only the table that was restored cannot be read
	}
	if loadErr == nil { // the next start is to take what was restored for what ought to be in force
		if done.wrote {
			g.Made, g.Captured = reload.MadeRestored, time.Now()
		}
		loadErr = s.saveProved(kernel, stored, []storedNativeTable{{generation: g, Held: done.held}}, done.proof)
	}
	return done.reply, true, errors.Join(err, loadErr)
}

// saveProved saves what is stored with tables that were put into force without a daemon, but for
// their held parts, as a read has proved them. The witness is the one that stands now: one that an
// earlier flush took says nothing of what follows.
func (s *NativeStore) saveProved(kernel NativeKernel, stored storedNative, proved []storedNativeTable, proof *native.Ruleset) error {
	for _, t := range proved {
		g := t.generation
		now := proof.Tables[g.Table.ID]
		witness, err := kernel.Witness(g.Table.ID.Family)
		if err != nil {
			return fmt.Errorf("keeping what was restored: asking for the witness: %w", err)
		}
		t.Verdict, t.Witness, t.Held = native.Intact, witness.Nonce, lasting(t.Held)
		t.generation = generationOf(now, now.Digest(), g.Made, g.Captured, here.Uptime()-time.Since(proof.At))
		others := slices.DeleteFunc(slices.Clone(stored.Tables), func(o storedNativeTable) bool { return o.generation.Table.ID == g.Table.ID })
		stored.Tables = append(others, t)
	}
	stored.Confirmed = cmp.Or(stored.Confirmed, here.Uptime())
	return s.save(stored)
}
