package daemon

import (
	"context"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// complainEvery is how often the log says the same of a loss that lasts.
	complainEvery = 30 * time.Second
)

// A hit is what one table lost.
type hit struct {
	verdict  canary.Verdict
	lost     reload.Lost
	policies []string
}

// gravity orders the kinds of loss; a record gets the gravest.
var gravity = []canary.Verdict{
	canary.Drifted, canary.HooksMissing, canary.Emptied, canary.Replaced, canary.ChainDeleted, canary.TableDeleted,
}

// tell puts what a read under guard showed into the open record, counts it
// and logs it. Tables that the record has already are passed over, so that a
// replay that is tried again counts nothing twice.
func (d *Daemon) tell(ctx context.Context, st *state, found map[rules.Family]map[rules.TableName]hit) {
	l := st.loss
	fresh := map[rules.Family]Verdicts{}
	for _, f := range rules.Families() {
		for _, t := range rules.Guarded() {
			h := found[f][t]
			if !h.verdict.Loss() || l.hit[f][t] != "" {
				continue
			}
			for _, verdicts := range []map[rules.Family]Verdicts{fresh, l.hit} {
				if verdicts[f] == nil {
					verdicts[f] = Verdicts{}
				}
				verdicts[f][t] = h.verdict
			}
			l.record.add(f, t, h)
			l.diff = append(l.diff, diffOf(f, t, h.lost, &l.room))
			l.unkept = l.diff
		}
	}
	if len(fresh) == 0 {
		return
	}
	if l.told {
		d.cfg.Metrics.ObserveFurtherLoss(fresh)
	} else {
		l.record.NoticedSeconds = l.noticed.Sub(l.record.Time).Seconds()
		d.cfg.Metrics.ObserveFlush(l.record.Time, fresh)
		l.told = true
	}
	d.logLost(ctx, st, fresh)
}

// logNotice says that a flush was noticed, before anything is done about it.
func (d *Daemon) logNotice(ctx context.Context, st *state) {
	next := "replaying the generation"
	if st.mode == Observe {
		next = "observe mode: the rules' owner has to put them back"
	}
	if st.mode == Heal && st.paused() {
		next = "replays are paused until " + st.pausedUntil.UTC().Format(time.RFC3339)
	}
	st.flushLog(ctx).Info("Rules are being flushed", "flush", st.loss.record.ID, "tables", tablesText(st.losses()),
		"noticedAfter", st.loss.noticed.Sub(st.loss.record.Time).Round(10*time.Microsecond), "next", next)
}

// losses returns the tables that are lost as far as is known.
func (st *state) losses() map[rules.Family]Verdicts {
	lost := map[rules.Family]Verdicts{}
	for f, fs := range st.families {
		lost[f] = Verdicts{}
		for t, ts := range fs.tables {
			if ts.verdict.Loss() {
				lost[f][t] = ts.verdict
			}
		}
	}
	return lost
}

// logLost says what exactly is lost.
func (d *Daemon) logLost(ctx context.Context, st *state, fresh map[rules.Family]Verdicts) {
	l, log := st.loss, st.flushLog(ctx)
	lost := l.record.Lost
	log.Info("Rules were lost", "flush", l.record.ID, "tables", tablesText(fresh),
		"rules", lost.Rules, "chains", lost.Chains, "hooks", lost.Hooks, "by", culpritText(l.record.Culprit))
	for _, p := range l.record.Policies {
		log.Info("A built-in policy is another than before; canaryd never sets policies", "flush", l.record.ID, "policy", p)
	}
}

func (d *Daemon) logRetry(ctx context.Context, st *state, err error) {
	l := st.loss
	advice := "canaryd keeps trying"
	if lockReason(err) {
		advice = "see which process holds the lock file that the error names: fuser -v FILE"
	}
	what := "Rules are still missing"
	if !l.told {
		what = "Rules may be missing"
	}
	log := st.flushLog(ctx)
	now := time.Now()
	if err != nil && err.Error() == l.complaint && now.Sub(l.complained) < complainEvery {
		log = log.V(2) // not a line for each try
	} else if err != nil {
		l.complaint, l.complained = err.Error(), now
	}
	if !log.Enabled() {
		return
	}
	log.Error(err, what,
		"flush", l.record.ID, "attempt", l.attempts, "retryIn", l.wait, "missingFor", time.Since(l.record.Time).Round(time.Millisecond), "advice", advice)
}

func (d *Daemon) logRecovery(ctx context.Context, st *state, l *loss, result reload.Result) {
	log := st.flushLog(ctx)
	what := "The rules are back and proved"
	switch l.record.Outcome {
	case reload.Skipped:
		what = "The rules are back: their owner was faster"
	case reload.Partial:
		what = "The rules are back, but for those that were left out"
	}
	log.Info(what, "flush", l.record.ID, "tables", tablesText(l.hit), "outcome", l.record.Outcome,
		"absent", time.Duration(l.record.AbsentSeconds*float64(time.Second)).Round(10*time.Microsecond), "attempts", l.attempts+1)
	for f, fr := range result {
		for t, tr := range fr.Tables {
			if n := len(tr.Skipped); n > 0 {
				log.Info("Chains were left as their owner had written them meanwhile", "flush", l.record.ID,
					"family", f, "table", t, "count", n, "chains", tr.Skipped[:min(n, namesKept)])
			}
		}
		if fr.Detour != nil && fr.Outcome != reload.Skipped {
			log.Info("Tables were written by iptables-restore, which takes longer", "flush", l.record.ID, "family", f, "directly", fr.Direct, "reason", fr.Detour)
		}
		if fr.Aftercare != nil {
			log.Error(fr.Aftercare, "The rules are back, but not all that follows worked", "flush", l.record.ID, "family", f)
		}
	}
}

// logUnreadable says once why a table is unknown.
func (d *Daemon) logUnreadable(ctx context.Context, f rules.Family, t rules.TableName, ts *tableState, err error) {
	if ts.trouble.met(err, time.Now()) {
		klog.FromContext(ctx).Error(err, "A table could not be examined; whether it lost rules is unknown", "family", f, "table", t)
	}
}

// tablesText returns "ipv4 nat emptied, ipv6 nat emptied".
func tablesText(verdicts map[rules.Family]Verdicts) string {
	var words []string
	for _, f := range rules.Families() {
		for _, t := range rules.Guarded() {
			if v := verdicts[f][t]; v != "" {
				words = append(words, fmt.Sprintf("%s %s %s", f, t, v))
			}
		}
	}
	return strings.Join(words, ", ")
}

func culpritText(c Culprit) string {
	switch {
	case c.PID == 0:
		return "unknown"
	case c.Command != "":
		return fmt.Sprintf("pid %d (%s)", c.PID, c.Command)
	case c.Comm != "":
		return fmt.Sprintf("pid %d (%s)", c.PID, c.Comm)
	default: // it ended before it could be looked up
		return fmt.Sprintf("pid %d", c.PID)
	}
}
