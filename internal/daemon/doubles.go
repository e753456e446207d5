package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A jump is doubled if its owner checks for it, a replay puts it back, and the owner then
// inserts it. canaryd removes the copy once the owner is quiet. Only a jump that a replay has
// just put back counts: other doubles are the owner's own. Doubles that were there when they
// were learned are part of the generation and stay.
//
// The copy harms owners that delete a jump once and then its chain. Measured on Linux 6.18 with
// iptables 1.8.9, nft and legacy:
//
//   - kube-proxy 1.36.3, --cleanup and a switch of its mode (CleanupLeftovers): one copy of one
//     jump makes the kernel refuse its one transaction for nat. nft says "Device or resource busy";
//     on legacy the line fails. At 100 services all 356 chains with 1,041 rules stay and keep
//     translating, and no process updates them. A second cleanup succeeds.
//   - CNI plugins of Debian 12: bridge's DEL fails ("Too many links"). The next one succeeds and
//     leaves chain and jump for ever. But only a new pod gets its jump inserted, and no replay
//     knows that jump. portmap's DEL never deletes its jumps, and works.
//   - Packets: the kernel translates a flow once. A flow that no service matches walks
//     KUBE-SERVICES twice. At 5,000 services a new flow took 197-298 us, and 303-430 us with a copy
//     of each jump.

// A placed jump was put back by a replay.
type placed struct {
	jump rules.Jump
	at   time.Time
	// doubled: since then it has more copies than before.
	doubled bool
}

// addPlaced remembers the jumps that a proved replay put into a table: copies of them by their
// owner are removed later.
func (ts *tableState) addPlaced(jumps []rules.Jump, now time.Time) {
	for _, h := range jumps {
		ts.placed = slices.DeleteFunc(ts.placed, func(p placed) bool { return p.jump.Same(h) })
		ts.placed = append(ts.placed, placed{jump: h, at: now})
	}
}

// withoutDoubles returns the section that learn takes, without the copies of jumps that their
// owner made during a replay, and plans to remove these. known is the generation's section:
// copies in it stay.
func (d *Daemon) withoutDoubles(fs *familyState, ts *tableState, known, seen rules.Section, now time.Time) rules.Section {
	kept := ts.placed[:0]
	for _, p := range ts.placed {
		// A copy that appears so much later is intended. After failed reads it may be older
		// than this read, so examined.since counts.
		if !p.doubled && fs.examined.since.Sub(p.at) > d.cfg.JumpGrace {
			continue
		}
		left := max(1, rules.Copies(known.Jumps, p.jump))
		p.doubled = rules.Copies(seen.Jumps, p.jump) > left
		if p.doubled {
			seen.Jumps = slices.DeleteFunc(slices.Clone(seen.Jumps), func(h rules.Jump) bool {
				if !h.Same(p.jump) {
					return false
				}
				left--
				return left < 0
			})
			fs.undoubleAt = pace.Latest(fs.undoubleAt, now.Add(d.cfg.JumpGrace))
		}
		kept = append(kept, p)
	}
	ts.placed = kept
	return seen
}

// doubled returns the jumps of a family that their owner doubled, for undouble to remove the
// copies.
func (fs *familyState) doubled() map[rules.TableName][]rules.Jump {
	found := map[rules.TableName][]rules.Jump{}
	for t, ts := range fs.tables {
		for _, p := range ts.placed {
			if p.doubled {
				found[t] = append(found[t], p.jump)
			}
		}
	}
	return found
}

// undouble removes the copies once the family has been quiet for the grace. An owner at work
// may be about to delete one itself.
func (d *Daemon) undouble(ctx context.Context, st *state) {
	now := time.Now()
	job := d.job(st)
	job.Doubled = map[rules.TableID][]rules.Jump{}
	for f, fs := range st.inOrder() {
		if !pace.Due(fs.undoubleAt, now) {
			continue
		}
		fs.undoubleAt = time.Time{}
		jumps := fs.doubled()
		if quietAt := fs.examined.moved.Add(d.cfg.JumpGrace); len(jumps) > 0 && (now.Before(quietAt) || !fs.examined.dirty.IsZero()) {
			fs.undoubleAt = pace.Latest(quietAt, now.Add(captureMost))
			continue
		}
		if len(jumps) > 0 {
			job.Families = append(job.Families, f)
			tableid.Put(job.Doubled, f, jumps)
		}
	}
	if len(job.Families) == 0 {
		return
	}
	result, err := d.replayer(ctx, st).RemoveDoubles(ctx, job)
	log := klog.FromContext(ctx)
	for _, f := range job.Families {
		fr, ok := result[f]
		if ok {
			d.applyResult(ctx, st, f, fr)
		}
		if ferr := errors.Join(err, fr.Err); ferr != nil {
			log.V(1).Info("Duplicate jumps could not be removed yet", "family", f, "reason", ferr)
			st.families[f].undoubleAt = time.Now().Add(d.cfg.JumpGrace)
			continue
		}
		st.families[f].forgetDoubles()
		if fr.Outcome != reload.Skipped {
			severity.Notices(log).Info("Extra copies of jumps were removed, and the jumps stay: their owner had written the copies during a replay",
				"family", f, "jumps", jumpTexts(tableid.Of(job.Doubled, f)))
		}
	}
	st.looking.plan(time.Now())
}

// jumpTexts names the first of a family's jumps for one line of the log.
func jumpTexts(jumps map[rules.TableName][]rules.Jump) (texts []string) {
	for _, t := range slices.Sorted(maps.Keys(jumps)) {
		for _, h := range jumps[t] {
			texts = append(texts, t+" "+h.Chain+" "+h.Rule.Label())
		}
	}
	return texts[:min(len(texts), flushes.NamesKept)]
}

// forgetDoubles forgets the doubled jumps of a family, whose copies are removed.
func (fs *familyState) forgetDoubles() {
	for _, ts := range fs.tables {
		ts.placed = slices.DeleteFunc(ts.placed, func(p placed) bool { return p.doubled })
	}
}
