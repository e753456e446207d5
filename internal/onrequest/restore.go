// Package onrequest carries out an operator's requests, with and without a daemon: restoring a
// generation, and cleaning up.
//
// [Restore] previews a restore, requires agreement to the rules that it would remove, and
// writes it; [ReplyOf] turns the result into a reply. [RemovalBy] and [KeepRemoval] record the
// removed rules. [RemoveAll] removes canaryd's marks, and on request the protected rules;
// [RemoveMade] deletes the empty tables that canaryd made.
//
// [ErrWhoseRules] refuses a cleanup that names no owner. The errors of pkg/reload are passed on.
// The package keeps no state, but only one replay may run at a time.
package onrequest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

func countsOf(p reload.Part) api.Counts {
	return api.Counts{Rules: len(p.Rules), Chains: len(p.Chains)}
}

// changesOf returns the changes of each table that changes, for a preview or a reply. It adds
// their lines if these are wanted. base marks rules that the baseline lacks; nil: no baseline.
func changesOf(changes reload.Changes, lines bool, base *baseline.Base) []api.TableChange {
	var list []api.TableChange
	left := flushes.DiffRoom()
	for _, id := range flushes.TableIDs() {
		c := changes[id]
		if c.Empty() {
			continue
		}
		fresh := notIn(base, id, c.Added.Rules)
		change := api.TableChange{
			Family: id.Family, Table: id.Name, Adds: countsOf(c.Added), Removes: countsOf(c.Removed),
			Reorders: len(c.Reordered), Removal: c.Removed.Digest(), NotInBaseline: len(fresh),
		}
		if lines {
			diff, n := diffOfChange(id, c, fresh, &left)
			change.Lines, change.More, change.NewLines = diff.Lines, diff.More, n
		}
		list = append(list, change)
	}
	return list
}

// diffOfChange returns the removed lines, then the added ones, as long as left has room, and
// reduces left. The lines of fresh added rules, which the baseline lacks, come before both;
// their number is returned.
func diffOfChange(id rules.TableID, c reload.Change, fresh []rules.Jump, left *flushes.Room) (api.TableDiff, int) {
	w := flushes.NewDiffWriter(id, *left)
	first := map[string]int{}
	for _, r := range fresh {
		w.Add("+", r.String())
		first["+"+r.String()]++
	}
	shown := len(w.Diff.Lines)
	for _, side := range []struct {
		sign string
		part reload.Part
	}{{"-", c.Removed}, {"+", c.Added}} {
		for _, name := range side.part.Chains {
			w.Add(side.sign, ":"+name+" - [0:0]")
		}
		for _, r := range side.part.Rules {
			if line := side.sign + r.String(); first[line] > 0 {
				first[line]--
				continue
			}
			w.Add(side.sign, r.String())
		}
	}
	*left = w.Room
	return w.Diff, shown
}

// previewOf describes the changes that a restore would make; nothing was written. It is the
// answer of a dry run or of a refused restore. base may be nil.
func previewOf(generation string, p reload.Preview, lines bool, base *baseline.Base) api.RestoreReply {
	reply := api.RestoreReply{Generation: generation, Outcomes: map[rules.Family]api.Outcome{}, Changes: changesOf(p.Changes, lines, base)}
	if err := errors.Join(p.Unread...); err != nil {
		reply.Detail = "left as it is, because it cannot be read: " + strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return reply
}

// changedBy returns the changes of a checked replay, as far as they were written. The reply and
// the record of removals show only these.
func changedBy(result reload.Result) reload.Changes {
	changes := reload.Changes{}
	for id, tr := range flushes.TablesOf(result) {
		if tr.Proved || tr.Unproved || tr.Replayed && !result[id.Family].Written.IsZero() {
			changes[id] = tr.Changed
		}
	}
	return changes
}

// refusal returns why a checked replay wrote only a part, or nothing: the removals were not
// those agreed to. It is nil if no check refused.
func refusal(result reload.Result) error {
	for _, f := range rules.Families() {
		if err := result[f].Err; errors.Is(err, reload.ErrNotAgreed) {
			return err
		}
	}
	return nil
}

// untouched reports whether a check refused a replay before anything was written. Restore then
// shows the new preview in place of outcomes.
func untouched(result reload.Result) bool {
	for _, fr := range result {
		if len(fr.Tables) > 0 && fr.Outcome != reload.Skipped {
			return false
		}
	}
	return refusal(result) != nil
}

// A Removal is the record of rules that canaryd removed on request.
type Removal struct {
	Record api.Flush
	Diff   []api.TableDiff
}

// NewRemoval returns a record without any tables of the removals that a restore makes on
// request. The callers add the tables. reply names the generation, and the one that undoes it.
func NewRemoval(reply api.RestoreReply, now time.Time) Removal {
	return Removal{Record: api.Flush{
		ID: fmt.Sprintf("%x", now.UnixMicro()), Time: now, Kind: api.Removed, Outcome: api.Requested, Attempts: 1,
		Culprit: api.Culprit{Time: now, PID: uint32(os.Getpid()), Comm: "canaryd", Command: "canaryd restore --generation " + reply.Generation},
		Detail:  undoing(reply),
	}}
}

// RemovalBy returns the record of a replay's removals, with their lines; false if there are
// none. Removed rules get a record even if an operator requested it.
func RemovalBy(reply api.RestoreReply, result reload.Result, now time.Time) (Removal, bool) {
	r := NewRemoval(reply, now)
	left := flushes.DiffRoom()
	changes := changedBy(result)
	for _, id := range flushes.TableIDs() {
		c := changes[id]
		if c.Removed.Empty() {
			continue
		}
		flushes.AddLoss(&r.Record, id, flushes.Hit{Verdict: api.Removed, Lost: lostBy(id.Name, c.Removed)})
		diff, _ := diffOfChange(id, c, nil, &left)
		r.Diff = append(r.Diff, diff)
	}
	r.Record.Kind = api.Removed // AddLoss took it from the verdicts
	return r, len(r.Diff) > 0
}

// lostBy returns a removed part as a loss, the form that a flush record takes. Rules of
// built-in chains are jumps.
func lostBy(t rules.TableName, removed reload.Part) reload.Lost {
	lost := reload.Lost{Rules: len(removed.Rules)}
	at := map[string]int{}
	chain := func(name string) *reload.LostChain {
		if _, ok := at[name]; !ok {
			at[name] = len(lost.Chains)
			lost.Chains = append(lost.Chains, reload.LostChain{Name: name, Stands: !slices.Contains(removed.Chains, name)})
		}
		return &lost.Chains[at[name]]
	}
	for _, name := range removed.Chains {
		chain(name)
	}
	for _, r := range removed.Rules {
		if rules.Builtin(t, r.Chain) {
			lost.Jumps = append(lost.Jumps, r)
			continue
		}
		c := chain(r.Chain)
		c.Was = append(c.Was, r.Rule)
	}
	return lost
}

// undoing names the command that brings back the rules that a restore removed, for the record;
// "" if nothing was kept.
func undoing(r api.RestoreReply) string {
	if r.Undo == "" {
		return ""
	}
	return fmt.Sprintf("`canaryd restore --generation %s --yes` brings the rules back that `canaryd restore --generation %s` took away", r.Undo, r.Generation)
}

// LogRemoval logs the removals of a replay on request, if there are any, with the generation
// that undoes them. record gives the ID of the flush record.
func LogRemoval(ctx context.Context, reply api.RestoreReply, record api.Flush) {
	var where []string
	for _, c := range reply.Changes {
		if c.Removal != "" {
			removed := api.Lost{Rules: c.Removes.Rules, Chains: c.Removes.Chains, Elements: c.Removes.Elements}
			where = append(where, c.Name()+": "+removed.Text(strconv.Itoa))
		}
	}
	severity.Notices(klog.FromContext(ctx)).Info("Protected rules were removed on request", "flush", record.ID, "generation", reply.Generation,
		"removed", strings.Join(where, ", "), "undo", reply.Undo)
}

// KeepRemoval records the removals of a replay without a daemon in the journal of the state
// folder. The next daemon lists them among earlier flushes.
func KeepRemoval(ctx context.Context, dir string, reply api.RestoreReply, result reload.Result) error {
	if r, any := RemovalBy(reply, result, time.Now()); any {
		return r.Keep(ctx, dir, reply)
	}
	return nil
}

// Keep logs a known removal and records it in the journal in dir, the state folder, for a
// command without a daemon. An error means that the record may not be on disk.
func (r Removal) Keep(ctx context.Context, dir string, reply api.RestoreReply) error {
	LogRemoval(ctx, reply, r.Record)
	entry, err := flushes.EntryOf(r.Record, r.Diff)
	if err != nil {
		return err
	}
	j := journal.New(dir)
	err = j.Keep(entry)
	j.Close()
	j.Run(func(written error) { err = errors.Join(err, written) })
	if err != nil {
		return fmt.Errorf("recording the removed rules: %w", err)
	}
	return nil
}

// Restore puts a generation into force: with force exactly that one, else only its lost parts.
// The operator must have agreed to the removals, as read right before the write. Rules that
// base does not have are marked; base is nil without a baseline.
func Restore(ctx context.Context, replayer reload.Replayer, force bool, job reload.Job, r api.RestoreRequest, base *baseline.Base) (api.RestoreReply, reload.Result, error) {
	replay, preview := replayer.Heal, replayer.PreviewHeal
	if force {
		replay, preview = replayer.Force, replayer.PreviewForce
	}
	id := job.Generation.ID()
	show := func() (api.RestoreReply, reload.Preview, error) {
		p, err := preview(ctx, job)
		return previewOf(id, p, r.DryRun, base), p, err
	}
	reply, p, err := show()
	if err != nil || r.DryRun {
		return reply, nil, err
	}
	if err := r.Agreed.Check(p.Changes); err != nil {
		reply.Refused = err.Error()
		return reply, nil, nil
	}
	job.Check = r.Agreed.Check
	result, err := replay(ctx, job)
	if result == nil {
		return api.RestoreReply{}, nil, err
	}
	if untouched(result) {
		again, _, previewErr := show()
		again.Refused = refusal(result).Error()
		return again, nil, errors.Join(err, previewErr)
	}
	reply = ReplyOf(id, result)
	reply.Changes = changesOf(changedBy(result), false, base)
	if refused := refusal(result); refused != nil {
		reply.Refused = refused.Error()
	}
	return reply, result, err
}
