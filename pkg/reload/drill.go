package reload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Drill names the parts of one table that canaryd removes, to see whether they are put back.
type Drill struct {
	Table rules.TableName
	// Kind is one of canary.DrillKinds: the change of the canary.
	Kind canary.Verdict
	// Chain, unless it is empty, is a built-in chain. The drill removes its protected jumps and its
	// witness, and leaves the canary. This affects packets.
	Chain string
}

// A Drilled has the parts that a drill removed.
type Drilled struct {
	// Marks are the marks of the tables that lost something in the drill; none if no table did.
	Marks canary.Marks
	// Tried are the marks of tables that may have lost something: the failed write leaves that
	// open. They name both marks, and the next read shows which one is in force.
	Tried canary.Marks
	// Jumps is the number of removed jumps.
	Jumps int
	// Written is when the kernel had written the removal.
	Written time.Time
}

// ErrNoDrill: a table is not in the state that a drill needs, and nothing was removed.
var ErrNoDrill = errors.New("no drill is possible")

// Drill removes the parts that d names in all families of the job, and puts nothing back. It reads
// and judges under guard first, and removes nothing from a table that is not intact, or that
// changed meanwhile. After an error some parts may be gone: see Marks and Tried. A table that has
// no canary is passed over; if none has one, the error wraps ErrNoDrill.
func (r Replayer) Drill(ctx context.Context, job Job, d Drill) (Drilled, error) {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return Drilled{}, fmt.Errorf("beginning a drill: %w", err)
	}
	var done Drilled
	for range staleReads {
		if done, err = r.drillOnce(ctx, s, job, d); !errors.Is(err, nft.ErrStale) {
			break
		}
	}
	if closeErr := s.Close(); closeErr != nil && err == nil {
		err = fmt.Errorf("ending a drill: %w", closeErr)
	}
	return done, err
}

// drillOnce reads every family, and writes if all of them are in the state that a drill needs.
// Drill calls it again after ErrStale: another process wrote, and nothing was removed.
func (r Replayer) drillOnce(ctx context.Context, s iptables.Session, job Job, d Drill) (Drilled, error) {
	done, payload, marks := Drilled{Marks: canary.Marks{}, Tried: canary.Marks{}}, iptables.Payload{}, job.Marks
	plans := map[rules.Family]*tablePlan{}
	for _, f := range job.Families {
		tasks, _, err := r.examine(ctx, s, f, job)
		if err != nil {
			return done, err
		}
		i := slices.IndexFunc(tasks, func(t tableTask) bool { return t.table == d.Table })
		if i < 0 || tasks[i].want.Mark.Nonce == "" {
			continue
		}
		plan, err := tasks[i].drill(d)
		if err != nil {
			return done, fmt.Errorf("%w: %s %s: %w", ErrNoDrill, f, d.Table, err)
		}
		if d.Chain != "" && len(plan.jumpsTaken) == 0 {
			continue
		}
		id := f.Table(d.Table)
		plans[f], payload[f] = plan, []iptables.Script{plan.script}
		marks = marks.With(id, marks[id].Trying(plan.want.Mark))
	}
	if len(payload) == 0 {
		missing := "a canary"
		if d.Chain != "" {
			missing += " and a protected jump in " + d.Chain
		}
		return done, fmt.Errorf("%w: table %s of no family has %s", ErrNoDrill, d.Table, missing)
	}
	if r.BeforeWrite != nil {
		r.BeforeWrite(marks)
	}
	var failed error
	for f, w := range s.Restore(ctx, payload) {
		id := f.Table(d.Table)
		if w.Err != nil {
			failed = errors.Join(failed, fmt.Errorf("taking the canary of %s %s: %w", f, d.Table, w.Err))
		}
		switch {
		case w.Err == nil || !w.At.IsZero(): // written, even if an error followed
			done.Marks, done.Jumps = done.Marks.With(id, plans[f].want.Mark), done.Jumps+len(plans[f].jumpsTaken)
		case !errors.Is(w.Err, nft.ErrStale) && !refusedWhole(w.Err):
			done.Tried = done.Tried.With(id, marks[id])
		}
		if w.At.After(done.Written) {
			done.Written = w.At
		}
	}
	if done.Written.IsZero() {
		done.Written = time.Now()
	}
	if len(done.Marks)+len(done.Tried) > 0 && errors.Is(failed, nft.ErrStale) {
		failed = errors.New(strings.ReplaceAll(failed.Error(), "\n", "; ")) // another try would remove parts twice
	}
	return done, failed
}

// refusedWhole reports whether iptables-restore refused the one table that it was given. It
// writes a table as a whole, unless it is killed. So the canary is still there, and drillOnce
// lists no tried mark.
func refusedWhole(err error) bool {
	refused, ok := errors.AsType[*iptables.RestoreError](err)
	return ok && refused.Exit > 0
}

// drill plans the removals of a drill from the table, for drillOnce. The error says why the
// table is not in the state for it. A family without a jump in d.Chain gets an empty plan.
func (t tableTask) drill(d Drill) (*tablePlan, error) {
	mark, plan := t.want.Mark, t.plan(t.want.Mark)
	switch v := t.finding.Verdict; {
	case t.finding.Err != nil:
		return nil, t.finding.Err
	case v == canary.Changed && d.Chain != "":
		// A jump that its owner has added would be lost, and a jump that its owner has removed
		// would be put back.
		return nil, errors.New("its owner has changed it, which is not learned yet; try again in a moment")
	case v != canary.Intact && v != canary.Changed:
		return nil, fmt.Errorf("it is %s", v)
	}
	if d.Chain == "" {
		standIn := canary.NewNonce()
		plan.want.Mark, plan.script = mark.Drilling(standIn), mark.DrillScript(t.table, t.want.CanaryChain, d.Kind, standIn)
		return plan, nil
	}
	if !slices.Contains(mark.Witnessed, d.Chain) {
		return plan, nil // no jump of this family is there
	}
	plan.steps.remove = append(plan.steps.remove, deleteRule(d.Chain, mark.Nonce.Witness()))
	for _, h := range t.seen.Section.Jumps {
		if h.Chain != d.Chain {
			continue
		}
		if _, opaque := h.Rule.Opaque(); opaque {
			return nil, fmt.Errorf("%s has a jump that could not be put back as text", d.Chain)
		}
		plan.steps.remove = append(plan.steps.remove, deleteRule(h.Chain, h.Rule))
		plan.jumpsTaken = append(plan.jumpsTaken, h)
	}
	return plan.scripted(), nil
}
