package daemon

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd learns what stands in protected chains, and puts it back after a flush, whichever
// process wrote it. A baseline shows an operator what came since rules were last
// confirmed. Nothing is done by it: no verdict, no replay and no refusal rests on it.

// compareShare keeps the comparison with the baseline below 2 % of a core.
const compareShare = 49

// baseline is what the loop knows of the baseline.
type baseline struct {
	taken  bool // what the disk has was taken up, or an operator has decided since
	stored reload.Baseline
	base   *rules.Baseline // nil: there is none, or its file is not believed
	err    error           // why it is not believed

	edition    int // of the generation that was compared last
	comparedAt time.Time
	cost       time.Duration
	changes    []rules.ChainChange
}

// baselineOf returns a stored baseline with what compares it. That may take 0.3 s: not in the loop.
func baselineOf(stored reload.Baseline, err error) baseline {
	if err != nil {
		if errors.Is(err, reload.ErrNothingStored) {
			err = nil
		}
		return baseline{taken: true, err: err}
	}
	base := rules.NewBaseline(stored.Generation)
	stored.Generation = nil
	return baseline{taken: true, stored: stored, base: base}
}

// loadBaseline reads the baseline, outside of the loop.
func (d *Daemon) loadBaseline() baseline {
	if d.cfg.Store == nil {
		return baseline{taken: true}
	}
	return baselineOf(d.cfg.Store.LoadBaseline())
}

// takeBaseline takes up what the disk has.
func (d *Daemon) takeBaseline(ctx context.Context, st *state, read baseline) {
	defer close(d.baselineTaken)
	st.baseline = read
	if read.err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(read.err, "The confirmed baseline is not believed; rules that appeared since are not shown, and nothing else depends on it",
			"confirmAgain", "canaryd baseline --confirm", "forgetIt", "canaryd baseline --forget")
	}
}

// compareAt returns when the generation is to be compared with the baseline.
func (d *Daemon) compareAt(st *state) time.Time {
	b := &st.baseline
	switch {
	case !st.baselineBehind():
		return time.Time{}
	case b.comparedAt.IsZero():
		return d.made
	default:
		return b.comparedAt.Add(compareShare * b.cost)
	}
}

// baselineBehind reports whether the generation is not the one that was compared last.
func (st *state) baselineBehind() bool {
	b := &st.baseline
	return b.base != nil && (b.comparedAt.IsZero() || b.edition != st.generation.edition)
}

// compareBaseline finds in what the generation differs from the baseline.
func (st *state) compareBaseline() {
	b := &st.baseline
	if !st.baselineBehind() {
		return
	}
	start := time.Now()
	b.changes = b.base.Since(st.want())
	b.edition, b.comparedAt = st.generation.edition, time.Now()
	b.cost = b.comparedAt.Sub(start)
}

// name names the baseline, nil if there is none.
func (b *baseline) name() *api.BaselineName {
	switch {
	case b.err != nil:
		return &api.BaselineName{Error: b.err.Error()}
	case !b.taken:
		return &api.BaselineName{Reading: true}
	case b.base == nil:
		return nil
	default:
		return &api.BaselineName{Generation: b.stored.ID, Confirmed: b.stored.Confirmed}
	}
}

// public returns the baseline as a Status has it, nil if there is none.
func (b *baseline) public() *api.Baseline {
	name := b.name()
	switch {
	case name == nil:
		return nil
	case b.base != nil && b.comparedAt.IsZero(), name.Reading:
		return &api.Baseline{BaselineName: api.BaselineName{Reading: true}}
	}
	p := api.Baseline{BaselineName: *name, Rules: b.stored.Rules, Chains: b.stored.Chains}
	for _, c := range b.changes {
		p.AppearedRules += len(c.Appeared)
		p.GoneRules += c.Gone
		if len(c.Appeared) > 0 {
			p.AppearedChains++
		}
		if c.Reordered {
			p.ReorderedChains++
		}
	}
	return &p
}

// unconfirmedListed is how many chains with rules that are not in the baseline a record names.
const unconfirmedListed = 10

// addTo puts into a record which rules that a table lost are not in the baseline. Where that
// is not known, the record says nothing.
func (b *baseline) addTo(r *api.Flush, id rules.TableID, lost reload.Lost) {
	if b.base == nil {
		return
	}
	n := api.NotInBaseline{BaselineName: *b.name()}
	if r.NotInBaseline != nil {
		n = *r.NotInBaseline // a copy of the record may be in use
		n.Chains = n.Chains[:len(n.Chains):len(n.Chains)]
	}
	add := func(chain string, list []rules.Rule) {
		lacking := len(b.base.Lacks(id.Family, id.Name, chain, list))
		n.Rules += lacking
		switch {
		case lacking == 0:
		case len(n.Chains) == unconfirmedListed:
			n.More++
		default:
			n.Chains = append(n.Chains, api.ChainName{Family: id.Family, Table: id.Name, Chain: strings.Clone(chain), Rules: lacking})
		}
	}
	for _, chain := range rules.BuiltinChains(id.Name) {
		add(chain, flushes.JumpsIn(lost.Jumps, chain))
	}
	for _, c := range lost.Chains {
		gone, _ := c.Apart()
		add(c.Name, gone)
	}
	r.NotInBaseline = &n
}
