package nativestore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// PartOfIt is the reason why a table is partial.
const PartOfIt = "a part of it could not be put back"

// Lasting returns the refused parts that are tried again. Parts that time or packets remove are
// not.
func Lasting(held []native.Held) []native.Held {
	return slices.DeleteFunc(slices.Clone(held), func(h native.Held) bool { return h.Fleeting })
}

// loadFor is Load for a command without a daemon that compares the protected tables with the
// kernel. kernel is nil without nf_tables. A table that cannot be compared is an error.
func (s *Store) loadFor(kernel Kernel, protects func(tableid.TableID) bool) (Stored, error) {
	stored, err := s.Load()
	if err != nil {
		return Stored{}, err
	}
	if stored.foreign != "" {
		return Stored{}, fmt.Errorf("the stored native tables cannot be used here: %s", stored.foreign)
	}
	if kernel == nil && slices.ContainsFunc(stored.Tables, func(t Row) bool { return protects(t.Generation.Table.ID) }) {
		return Stored{}, ErrNoNFTables
	}
	if kernel == nil {
		return Stored{}, nil
	}
	return stored, nil
}

// RestoreStored puts back, without a daemon, the stored native tables that are protected and
// lost (canaryd restore). With dry it only lists them, with the rules that base lacks. If another
// process writes meanwhile, it reads and tries again, Tries times.
func (s *Store) RestoreStored(kernel Kernel, protects func(tableid.TableID) bool, dry bool, base *baseline.Base) ([]api.NativeRestored, error) {
	stored, err := s.loadFor(kernel, protects)
	if err != nil || len(stored.Tables) == 0 {
		return nil, err
	}
	for range Tries {
		var seen *native.Ruleset
		if seen, err = kernel.Capture(func(t nft.Table) bool { return protects(t.Family.Table(t.Name)) }); err != nil {
			return nil, err
		}
		repairs, left, judgeErr := stored.repairs(kernel, seen, protects)
		if judgeErr != nil || dry || len(repairs) == 0 {
			return Outcomes(repairs, left, base), judgeErr
		}
		w := writeAndProve(kernel, seen.Genid, repairs)
		if err = w.err; w.stale() {
			continue
		}
		rows := Outcomes(nil, left, nil)
		var proved []Row
		for _, repair := range repairs {
			i := slices.IndexFunc(stored.Tables, func(t Row) bool { return t.Generation.Table == repair.Want })
			proved = append(proved, Row{Generation: stored.Tables[i].Generation, Held: repair.Held()})
			rows = append(rows, w.row(repair))
		}
		sorting.Stable(rows, func(a, b api.NativeRestored) int { return cmp.Compare(a.Table, b.Table) })
		if err != nil {
			return rows, nil
		}
		return rows, s.saveProved(kernel, stored, proved, w.Proof)
	}
	return nil, fmt.Errorf("restoring native tables, %d times: %w", Tries, err)
}

// CheckStored judges, without a daemon, the stored native tables that protects names, for
// canaryd check. It also returns their parts in quarantine. It may return rows and an error.
func (s *Store) CheckStored(kernel Kernel, protects func(tableid.TableID) bool) (rows []api.NativeTable, parts []api.Quarantined, err error) {
	stored, err := s.loadFor(kernel, protects)
	if err != nil || len(stored.Tables) == 0 {
		return nil, nil, err
	}
	seen, err := kernel.Capture(func(t nft.Table) bool { return protects(t.Family.Table(t.Name)) })
	if err != nil {
		return nil, nil, err
	}
	judged, err := stored.judge(kernel, seen, protects)
	for _, j := range judged {
		id := j.generation.Table.ID
		row := api.NativeTable{Family: id.Family.NFT(), Table: id.NFT(), Verdict: canary.Verdict(j.finding.Verdict), Why: j.finding.Why, Generation: j.generation.ID}
		row.Chains, row.Rules, row.Elements = j.generation.Table.Counts()
		if n := len(j.held); n > 0 && !Lost(j.finding.Verdict) {
			row.Verdict, row.Why = canary.Partial, PartOfIt
			row.QuarantinedParts = n
			for _, h := range j.held {
				parts = append(parts, api.HeldOf(id, h))
			}
		}
		if now := seen.Tables[id]; now != nil && now.Immune() {
			row.Verdict, row.Immune, row.Why = canary.Intact, true, "one process owns it, and no other can flush it"
		}
		rows = append(rows, row)
	}
	sorting.Stable(rows, func(a, b api.NativeTable) int { return cmp.Compare(a.Table, b.Table) })
	return rows, parts, err
}

// A storedFinding is the state of a stored table.
type storedFinding struct {
	generation Generation
	finding    native.Finding
	held       []native.Held
}

// judge compares stored tables with a read, for a check and a restore. canaryd heard of no
// commits in between, so a verdict rests on the content and the witness alone.
func (s Stored) judge(kernel Kernel, seen *native.Ruleset, protects func(tableid.TableID) bool) (all []storedFinding, err error) {
	for i, t := range s.Tables {
		want := t.Generation.Table
		id := want.ID
		if i >= protect.MaxNative || !protects(id) {
			continue
		}
		witness, err := kernel.Witness(id.Family)
		if err != nil {
			return nil, err
		}
		if _, left := seen.LeftOut[id]; left {
			all = append(all, storedFinding{t.Generation, native.Finding{Verdict: native.Verdict(canary.Unknown), Why: ErrTooLarge.Error()}, t.Held})
			continue
		}
		all = append(all, storedFinding{t.Generation, native.Judge(native.Evidence{Was: want, Now: seen.Tables[id], Missed: true,
			Habits: owners.HabitsOf(id), WitnessLost: t.Witness != "" && witness.Nonce != t.Witness}), t.Held})
	}
	return all, nil
}

// repairs returns the repairs of lost stored tables in the order of their creation, and in left
// the lost tables that cannot be put back.
func (s Stored) repairs(kernel Kernel, seen *native.Ruleset, protects func(tableid.TableID) bool) (all []native.Repair, left []*native.Table, err error) {
	up := here.Uptime()
	judged, err := s.judge(kernel, seen, protects)
	for _, j := range judged {
		want, now := j.generation.Table, seen.Tables[j.generation.Table.ID]
		switch remedy := AskedRemedy(j.finding, now); {
		case now != nil && now.Immune(): // no other process can write it, nor flush it
		case j.finding.Verdict == native.Verdict(canary.Unknown):
		case remedy != native.NoRemedy:
			all = append(all, native.NewRepair(remedy, want, now, up-j.generation.Read))
		case Lost(j.finding.Verdict):
			left = append(left, want)
		}
	}
	sorting.Stable(all, func(a, b native.Repair) int { return cmp.Compare(a.Want.Handle, b.Want.Handle) })
	return all, left, err
}

// RestoreGeneration brings, without a daemon, a native table to the stored generation of that
// ID. found is false if there is no such generation. kernel is nil without nf_tables, and base
// without a baseline.
func (s *Store) RestoreGeneration(ctx context.Context, kernel Kernel, protects func(tableid.TableID) bool, r api.RestoreRequest, base *baseline.Base) (reply api.RestoreReply, found bool, err error) {
	g, err := s.Read(r.Generation)
	if errors.Is(err, reload.ErrNothingStored) {
		return api.RestoreReply{}, false, nil
	}
	if err == nil {
		err = s.MayRestore(g, protects)
	}
	if err != nil {
		return api.RestoreReply{}, true, err
	}
	if kernel == nil {
		return api.RestoreReply{}, true, ErrNoNFTables
	}
	done, err := returning{kernel, s, g, here.Uptime, base}.do(r)
	if err != nil {
		return done.Reply, true, err
	}
	if gone, any := done.Removal(g, time.Now()); any {
		err = gone.Keep(ctx, filepath.Dir(s.path), done.Reply)
	}
	if !done.Proved() {
		return done.Reply, true, err
	}
	stored, loadErr := s.Load()
	if len(stored.Unread) > 0 && !slices.ContainsFunc(stored.Unread, func(u reload.Unread) bool { return u.Table != g.Name }) {
		loadErr = nil // only the table that was restored cannot be read
	}
	if loadErr == nil { // the restored content is the expected one at the next start
		if done.Wrote {
			g.Made, g.Captured = reload.MadeRestored, time.Now()
		}
		loadErr = s.saveProved(kernel, stored, []Row{{Generation: g, Held: done.Held}}, done.Proof)
	}
	return done.Reply, true, errors.Join(err, loadErr)
}

// saveProved saves tables that a command without a daemon put into force, as a read has proved
// them, but for their held parts. It saves the present witness, because a witness that an
// earlier flush removed would prove nothing about later flushes.
func (s *Store) saveProved(kernel Kernel, stored Stored, proved []Row, proof *native.Ruleset) error {
	for _, t := range proved {
		g := t.Generation
		now := proof.Tables[g.Table.ID]
		witness, err := kernel.Witness(g.Table.ID.Family)
		if err != nil {
			return fmt.Errorf("keeping the restored table: reading the witness: %w", err)
		}
		t.Verdict, t.Witness, t.Held = native.Intact, witness.Nonce, Lasting(t.Held)
		t.Generation = GenerationOf(now, now.Digest(), g.Made, g.Captured, here.Uptime()-time.Since(proof.At))
		others := slices.DeleteFunc(slices.Clone(stored.Tables), func(o Row) bool { return o.Generation.Table.ID == g.Table.ID })
		stored.Tables = append(others, t)
	}
	stored.Confirmed = cmp.Or(stored.Confirmed, here.Uptime())
	return s.Save(stored)
}

// ErrNoNFTables means that an earlier run guarded native tables, and the kernel has no
// nf_tables now.
var ErrNoNFTables = errors.New("the kernel has no nf_tables any more")
