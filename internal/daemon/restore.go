package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"github.com/canaryd/canaryd/pkg/tableid"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// Removed is the kind of a record of what canaryd itself took away, because an operator
	// asked for an earlier generation. It is no verdict.
	Removed canary.Verdict = "removed"
	// Requested is the outcome of such a record: nothing is to be put back.
	Requested Outcome = "requested"
)

// A TableChange is what a restore does, or would do, to the protected rules of one table.
type TableChange struct {
	Family  rules.Family    `json:"family"`
	Table   rules.TableName `json:"table"`
	Adds    Counts          `json:"adds"`
	Removes Counts          `json:"removes"`
	// Reorders counts chains that get the same rules in another order.
	Reorders int `json:"reorders,omitempty"`
	// Removal identifies what is removed: it is what RestoreRequest.Agreed holds.
	Removal string `json:"removal,omitempty"`
	// Lines are the rules of a dry run in the words of iptables-save, behind - and +.
	Lines []string `json:"lines,omitempty"`
	More  int      `json:"more,omitempty"` // lines that were left out
}

// Counts count rules, jumps from built-in chains included, and whole chains.
type Counts struct {
	Rules  int `json:"rules"`
	Chains int `json:"chains"`
}

func countsOf(p reload.Part) Counts { return Counts{Rules: len(p.Rules), Chains: len(p.Chains)} }

// changesOf returns the changes of each table that changes, with their lines if these are
// wanted.
func changesOf(changes reload.Changes, lines bool) []TableChange {
	var list []TableChange
	left := diffRoom()
	for _, f := range rules.Families() {
		for _, t := range rules.Guarded() {
			c := changes[f.Table(t)]
			if c.Empty() {
				continue
			}
			change := TableChange{
				Family: f, Table: t, Adds: countsOf(c.Added), Removes: countsOf(c.Removed),
				Reorders: len(c.Reordered), Removal: c.Removed.Digest(),
			}
			if lines {
				diff := diffOfChange(f, t, c, &left)
				change.Lines, change.More = diff.Lines, diff.More
			}
			list = append(list, change)
		}
	}
	return list
}

// diffOfChange returns what is removed, then what is added, as long as there is room.
func diffOfChange(f rules.Family, t rules.TableName, c reload.Change, left *room) TableDiff {
	w := diffWriter{diff: TableDiff{Family: f, Table: t, Lines: []string{}}, room: *left}
	for _, side := range []struct {
		sign string
		part reload.Part
	}{{"-", c.Removed}, {"+", c.Added}} {
		for _, name := range side.part.Chains {
			w.add(side.sign, ":"+name+" - [0:0]")
		}
		for _, r := range side.part.Rules {
			w.add(side.sign, r.String())
		}
	}
	*left = w.room
	return w.diff
}

// Agreement returns what agrees to exactly the removals of a preview.
func (r RestoreReply) Agreement() reload.Agreement {
	a := reload.Agreement{}
	for _, c := range r.Changes {
		if c.Removal == "" {
			continue
		}
		a[c.Family.Table(c.Table)] = c.Removal
	}
	return a
}

// Removes counts what a restore takes away, in all tables.
func (r RestoreReply) Removes() Counts {
	var all Counts
	for _, c := range r.Changes {
		all.Rules += c.Removes.Rules
		all.Chains += c.Removes.Chains
	}
	return all
}

// PreviewOf says what a restore would do. Nothing was written.
func PreviewOf(generation string, p reload.Preview, lines bool) RestoreReply {
	reply := RestoreReply{Generation: generation, Outcomes: map[rules.Family]Outcome{}, Changes: changesOf(p.Changes, lines)}
	if err := errors.Join(p.Unread...); err != nil {
		reply.Detail = "left as it is, because it cannot be read: " + strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return reply
}

// changedBy returns what a checked replay changed, as far as it was written.
func changedBy(result reload.Result) reload.Changes {
	changes := reload.Changes{}
	for f, fr := range result {
		for t, tr := range fr.Tables {
			if tr.Proved || tr.Unproved || tr.Replayed && !fr.Written.IsZero() {
				changes[f.Table(t)] = tr.Changed
			}
		}
	}
	return changes
}

// refusal returns why a checked replay wrote not all, or nothing; nil if no check refused.
func refusal(result reload.Result) error {
	for _, f := range rules.Families() {
		if err := result[f].Err; errors.Is(err, reload.ErrNotAgreed) {
			return err
		}
	}
	return nil
}

// Untouched reports whether a check refused a replay before anything was written.
func Untouched(result reload.Result) bool {
	if refusal(result) == nil {
		return false
	}
	for _, fr := range result {
		if len(fr.Tables) > 0 && fr.Outcome != reload.Skipped {
			return false
		}
	}
	return true
}

// A removal is the record of what canaryd took away on request.
type removal struct {
	record Flush
	diff   []TableDiff
}

// removalBy returns what a replay took away; false if that is nothing.
func removalBy(reply RestoreReply, result reload.Result, now time.Time) (removal, bool) {
	r := removal{record: Flush{
		ID: fmt.Sprintf("%x", now.UnixMicro()), Time: now, Outcome: Requested, Attempts: 1,
		Culprit: Culprit{Time: now, PID: uint32(os.Getpid()), Comm: "canaryd", Command: "canaryd restore --generation " + reply.Generation},
		Detail:  reply.undoing(),
	}}
	left := diffRoom()
	changes := changedBy(result)
	for _, f := range rules.Families() {
		for _, t := range rules.Guarded() {
			c := changes[f.Table(t)]
			if c.Removed.Empty() {
				continue
			}
			r.record.add(f, t, hit{verdict: Removed, lost: lostBy(t, c.Removed)})
			r.diff = append(r.diff, diffOfChange(f, t, c, &left))
		}
	}
	r.record.Kind = Removed
	return r, len(r.diff) > 0
}

// lostBy returns a removed part as a loss.
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
			lost.Hooks = append(lost.Hooks, r)
			continue
		}
		c := chain(r.Chain)
		c.Was = append(c.Was, r.Rule)
	}
	return lost
}

// undoing says how to bring back what a restore took away.
func (r RestoreReply) undoing() string {
	if r.Undo == "" {
		return ""
	}
	return fmt.Sprintf("`canaryd restore --generation %s --yes` brings the rules back that `canaryd restore --generation %s` took away", r.Undo, r.Generation)
}

// LogRemoval says what a replay took away; it says nothing if that is nothing.
func LogRemoval(ctx context.Context, reply RestoreReply, record Flush) {
	var where []string
	for _, c := range reply.Changes {
		if c.Removal != "" {
			where = append(where, fmt.Sprintf("%s %s %d rules and %d chains", c.Family, c.Table, c.Removes.Rules, c.Removes.Chains))
		}
	}
	klog.FromContext(ctx).Info("Protected rules were removed on request", "flush", record.ID, "generation", reply.Generation,
		"removed", strings.Join(where, ", "), "undo", reply.Undo)
}

// noteRemoval records and logs what an asked-for replay took away.
func (d *Daemon) noteRemoval(ctx context.Context, st *state, reply RestoreReply, result reload.Result) {
	r, any := removalBy(reply, result, time.Now())
	if !any {
		return
	}
	st.remember(r.record)
	d.write(ctx, r.record, r.diff)
	LogRemoval(ctx, reply, r.record)
}

// KeepRemoval records in the journal of the state folder what a replay without a daemon took
// away. The next daemon lists it among the flushes of before.
func KeepRemoval(ctx context.Context, dir string, reply RestoreReply, result reload.Result) error {
	r, any := removalBy(reply, result, time.Now())
	if !any {
		return nil
	}
	LogRemoval(ctx, reply, r.record)
	record, err := json.Marshal(r.record)
	if err != nil {
		return err
	}
	detail, err := json.Marshal(flushDetail{r.diff})
	if err != nil {
		return err
	}
	j := journal.New(dir)
	err = j.Keep(journal.Entry{ID: r.record.ID, Record: record, Detail: detail})
	j.Close()
	j.Run(func(written error) { err = errors.Join(err, written) })
	if err != nil {
		return fmt.Errorf("recording what was removed: %w", err)
	}
	return nil
}

// Requested reports whether a record is of what an operator asked for, and no flush.
func (f Flush) Requested() bool { return f.Kind == Removed }

// lastFlush returns the newest record of a flush; what an operator asked for is none.
func (s Status) lastFlush() (Flush, bool) {
	for _, f := range s.Flushes {
		if !f.Requested() {
			return f, true
		}
	}
	return Flush{}, false
}

// A replay is a way to put a generation into force, and what it would do.
type replay struct {
	do      func(context.Context, reload.Job) (reload.Result, error)
	preview func(context.Context, reload.Job) (reload.Preview, error)
}

// Restoring puts a generation into force: exactly that one if force, else what is lost of
// it. What that takes away must be agreed to, by what is read right before it is written.
func Restoring(ctx context.Context, replayer reload.Replayer, force bool, job reload.Job, r RestoreRequest) (RestoreReply, reload.Result, error) {
	way := replay{replayer.Heal, replayer.PreviewHeal}
	if force {
		way = replay{replayer.Force, replayer.PreviewForce}
	}
	id := job.Generation.ID()
	show := func() (RestoreReply, reload.Preview, error) {
		p, err := way.preview(ctx, job)
		return PreviewOf(id, p, r.DryRun), p, err
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
	result, err := way.do(ctx, job)
	if result == nil {
		return RestoreReply{}, nil, err
	}
	if Untouched(result) {
		again, _, previewErr := show()
		again.Refused = refusal(result).Error()
		return again, nil, errors.Join(err, previewErr)
	}
	reply = ReplyOf(id, result)
	reply.Changes = changesOf(changedBy(result), false)
	if refused := refusal(result); refused != nil {
		reply.Refused = refused.Error()
	}
	return reply, result, err
}
