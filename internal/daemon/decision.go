package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// dismissCommand accepts a loss, and restoreCommand brings back a native table.
const (
	dismissCommand = "canaryd dismiss"
	restoreCommand = "canaryd restore"
)

// A decision is a loss of stored rules that only an operator or the rules' owner ends.
// Meanwhile canaryd learns and guards the present content of the tables. The lost generation
// stays on disk.
type decision struct {
	record     api.Flush
	id         string           // of the generation that was lost
	generation rules.Generation // its rules; a table without any cannot be seen to be back
	identity   reload.Identity  // that it is bound to
	backend    iptables.Backend // that it was guarded on
	reason     string           // why it is not replayed unasked
	waiting    flushes.Verdicts // of the tables that lack rules
	diff       []api.TableDiff
	room       flushes.Room
	kept       bool         // it is on disk
	trouble    pace.Trouble // why it is not
}

// of reports whether the decision is about the generation of that ID.
func (w *decision) of(id string) bool { return w != nil && w.id == id }

// waitsIn reports whether a table of the family lacks rules.
func (w *decision) waitsIn(f rules.Family) bool { return w != nil && len(tableid.Of(w.waiting, f)) > 0 }

// public returns the decision as a status and the log have it. ours is the guarded backend: on
// another one, the way to restore begins with that.
func (w *decision) public(ours iptables.Backend) api.Decision {
	p := api.Decision{
		Flush: w.record.ID, Since: w.record.Time, Generation: w.id, Reason: w.reason,
		Tables: w.waiting.Public(), Restore: "canaryd restore --generation " + w.id, Dismiss: dismissCommand,
	}
	if w.backend != ours {
		p.Restore = fmt.Sprintf("canaryd run --backend=%s, and then %s", w.backend, p.Restore)
	}
	return p
}

// addTo puts the decision into a status. Its tables count as lost there, although their present
// content is guarded.
func (w *decision) addTo(s *api.Status) {
	if w == nil || s.Stopped {
		return
	}
	p := w.public(s.Backend.Name)
	s.Decision = &p
	for id, v := range w.waiting {
		if shown := s.Families[id.Family]; !shown[id.Name].Loss() {
			shown[id.Name] = v
		}
	}
	s.LossSince = pace.Earliest(s.LossSince, w.record.Time)
}

// logAwaiting logs the loss that waits for a decision, and the operator's choices.
func (d *Daemon) logAwaiting(ctx context.Context, w *decision) {
	lost, p := w.record.Lost, w.public(d.cfg.Kernel.Info().Backend)
	log := klog.FromContext(ctx)
	if !w.record.LastInForce.IsZero() {
		log = log.WithValues("lastInForce", w.record.LastInForce.UTC().Format(time.RFC3339))
	}
	log.Error(errors.New(w.reason), awaitDecision,
		"flush", w.record.ID, "tables", w.waiting.Text(), "rules", lost.Rules, "chains", lost.Chains, "jumps", lost.Jumps,
		"generation", w.id, "bringThemBack", p.Restore, "acceptTheLoss", p.Dismiss)
}

// judgeDecision ends a decision once examinations show that the rules of all waiting tables are
// back. They need not be the same: their owner may have changed them.
func (d *Daemon) judgeDecision(ctx context.Context, st *state, snapshot iptables.Snapshot) {
	w, f := st.decision, snapshot.Family
	if !w.waitsIn(f) {
		return
	}
	maps.DeleteFunc(w.waiting, func(id rules.TableID, _ canary.Verdict) bool {
		return id.Family == f && snapshot.Unreadable[id.Name] == nil && len(w.generation) > 0 && canary.Covers(w.generation[id], snapshot.Tables[id.Name])
	})
	if len(w.waiting) == 0 {
		d.endDecision(ctx, st, reload.Skipped)
	}
}

// endDecision ends a decision: the rules are back, or an operator has accepted the loss
// (outcome api.Dismissed). The disk forgets the decision.
func (d *Daemon) endDecision(ctx context.Context, st *state, outcome api.Outcome) {
	w, now := st.decision, time.Now()
	st.decision = nil
	st.generation.edition++
	st.disk.saveSoon(now)
	w.record.Outcome, w.record.Detail = outcome, ""
	if outcome != api.Dismissed && !w.record.LastInForce.IsZero() {
		d.cfg.Metrics.ObserveRecovery(flushes.EndAbsence(&w.record, now), nil)
	}
	st.journal.Rewrite(w.record)
	d.write(ctx, w.record, nil)
	log, tables := klog.FromContext(ctx).WithValues("generation", w.id), flushes.Recorded(w.record).Text()
	if outcome == api.Dismissed {
		severity.Notices(log).Info(lossAccepted, "flush", w.record.ID, "tables", tables)
	} else {
		flushes.LogBack(log, tables, w.record, outcome != reload.Skipped, w.record.Attempts)
	}
	// If the present marks are not on disk yet, the marks there are older, and no evidence any
	// more.
	forget := d.cfg.Store.ForgetPending
	if !d.cfg.Store.Holds() {
		forget = d.cfg.Store.Forget
	}
	err := forget()
	d.countStateError(err)
	if err != nil {
		severity.Warnings(log).Error(err, "A loss no longer waits for a decision, but the disk still has it; after a restart it waits again",
			"flush", w.record.ID, "advice", "make the state folder writable; if the loss waits again: "+dismissCommand)
	}
}

// keepDecision writes the decision to disk, and returns false if that fails: then the stored
// files must stay, because they show the loss.
func (d *Daemon) keepDecision(ctx context.Context, st *state) bool {
	w := st.decision
	if w == nil || w.kept || d.cfg.Store == nil {
		return true
	}
	record, err := json.Marshal(w.record)
	if err == nil {
		err = d.cfg.Store.SavePending(reload.Pending{Identity: w.identity, ID: w.id, Reason: w.reason, Record: record})
	}
	w.kept = err == nil
	d.countStateError(err)
	w.trouble.Report(pace.Warnings(ctx), err, "The loss that waits for a decision is not on disk; canaryd writes no state until it is")
	return w.kept
}

// recallDecision takes up a loss that has waited for a decision since an earlier run of this
// boot. An unreadable one of this boot waits as an unread file.
func (d *Daemon) recallDecision(ctx context.Context, st *state) {
	log := klog.FromContext(ctx)
	pending, err := d.cfg.Store.LoadPending()
	var record api.Flush
	if err == nil {
		err = json.Unmarshal(pending.Record, &record)
	}
	switch {
	case errors.Is(err, reload.ErrNothingStored):
		return
	case errors.Is(err, reload.ErrForeign):
		if err := d.cfg.Store.ForgetPending(); err != nil {
			severity.Warnings(log).Error(err, "Could not delete a loss of another boot from disk; it is ignored")
		}
		return
	case err != nil && !reload.OfThisBoot(d.cfg.Store.PendingPath(), d.booted()):
		severity.Warnings(log).Error(err, "A loss of another boot that waited for a decision cannot be read and is forgotten")
		return
	case err != nil:
		d.noteUnread(ctx, st, reload.Unread{File: d.cfg.Store.PendingPath(), Reason: err.Error(), Since: time.Now()})
		return
	}
	w := &decision{record: record, id: pending.ID, identity: pending.Identity, backend: iptables.Backend(pending.Identity.Backend),
		reason: pending.Reason, room: flushes.DiffRoom(), kept: true, waiting: flushes.Verdicts{}}
	for _, t := range w.record.Lost.Tables {
		if st.families[t.Family] != nil && t.Rules > 0 {
			w.waiting[t.Family.Table(t.Table)] = t.Kind
		}
	}
	if len(w.waiting) == 0 {
		return // its families are not watched now
	}
	stored, err := d.cfg.Store.LoadHere(w.id)
	if err != nil {
		log.Error(err, "The generation that was lost cannot be read; only `canaryd dismiss` ends the wait for a decision")
	}
	w.generation = st.unclaimed(stored.Generation)
	st.decision = w
	d.recallSets(ctx, st)
	d.logAwaiting(ctx, w)
}

// lost returns the generation that waits, none without a decision: its ipsets are kept, too.
func (w *decision) lost() rules.Generation {
	if w == nil {
		return nil
	}
	return w.generation
}

// settleEarlier ends the records of earlier runs that waited for a decision, as interrupted.
// The record that still waits is kept open, as an earlier run's.
func (st *state) settleEarlier() {
	for i := range st.journal {
		r := &st.journal[i]
		if r.Outcome == api.AwaitingDecision && (st.decision == nil || st.decision.record.ID != r.ID) {
			r.Outcome = api.Interrupted
		}
	}
	if w := st.decision; w != nil {
		w.record.Earlier = true
		st.journal.Rewrite(w.record)
	}
}

// Dismiss accepts the loss that waits for a decision, and the loss of rules that cannot be put
// back. Then the present content of the tables ought to be in force, with the rules that waited
// for others. The lost generation stays on disk like any other.
func (d *Daemon) Dismiss(ctx context.Context) (api.DismissReply, error) {
	var reply api.DismissReply
	err := d.askGuard(ctx, func(ctx context.Context, st *state) error {
		if w := st.decision; w != nil {
			reply = api.DismissReply{Flush: w.record.ID, Generation: w.id, Rules: w.record.Lost.Rules}
			d.endDecision(ctx, st, api.Dismissed)
		}
		var records []api.Flush
		reply.Unread = d.dropUnread(ctx, st, func(reload.Unread) bool { return true })
		st.older, st.native.older = older{}, older{}
		reply.Native, records = d.dismissNative(st)
		if len(records) > 0 && reply.Flush == "" {
			reply.Flush = records[0].ID
		}
		reply.Policies = d.dismissPolicies(st)
		reply.Quarantined, reply.Waiting = d.dismissQuarantined(ctx, st)
		return nil
	})
	return reply, err
}

// restored takes a replay of the generation of that ID, which an operator requested, into the
// decision. The reply to a replay that did not bring back the waiting rules no longer counts as
// proved.
func (d *Daemon) restored(ctx context.Context, st *state, id string, reply api.RestoreReply, result reload.Result) api.RestoreReply {
	w := st.decision
	if w == nil {
		return reply
	}
	if w.of(id) && reply.Proved() {
		w.record.Attempts++
		now := time.Now()
		for _, fs := range st.families { // the restored rules are old: kube-proxy must have the last word
			fs.proxy.askSoon(now)
			fs.examined.plan(now)
		}
		d.endDecision(ctx, st, worst(result))
		return reply
	}
	for id := range w.waiting {
		if reply.Outcomes[id.Family].Done() {
			reply.Outcomes[id.Family] = reload.Partial
		}
	}
	if reply.Detail == "" {
		reply.Detail = w.public(d.cfg.Kernel.Info().Backend).Problem().Error()
	}
	return reply
}
