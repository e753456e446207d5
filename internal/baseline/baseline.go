// Package baseline compares the generation with rules that an operator has confirmed, and
// reports newer rules. No decision about a flush depends on it.
//
// [Of] prepares the stored baseline, and takes up to 0.3 s, so call it outside of the loop.
// [Known.Compare] compares one edition of the generation, at the time that [Known.CompareAt]
// returns. [Known.Public], [Known.List] and [Known.AddTo] report the result in a status, a reply
// and a flush record.
//
// A baseline that cannot be read is not used; Known.Err is the reason. A Known is for one
// goroutine.
package baseline

import (
	"errors"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// CompareShare keeps the comparison with the baseline below 2 % of a core.
const CompareShare = 49

// Known is the loop's knowledge about the baseline.
type Known struct {
	taken  bool // the disk's content was read, or an operator has decided since
	stored reload.Baseline
	Base   *rules.Baseline // nil: there is none, or its file cannot be trusted
	Err    error           // why it cannot be trusted

	edition    int // of the last compared generation
	comparedAt time.Time
	cost       time.Duration
	changes    []rules.ChainChange
}

// Of prepares a stored baseline for comparisons; err is the error of loading it, and
// ErrNothingStored means that there is none. That may take 0.3 s, so do not call it in the
// loop.
func Of(stored reload.Baseline, err error) Known {
	if err != nil {
		if errors.Is(err, reload.ErrNothingStored) {
			err = nil
		}
		return Known{taken: true, Err: err}
	}
	base := rules.NewBaseline(stored.Generation)
	stored.Generation = nil
	return Known{taken: true, stored: stored, Base: base}
}

// None returns the Known without a baseline.
func None() Known { return Known{taken: true} }

// CompareAt returns when the generation of an edition must be compared with the baseline; zero
// if that was done. made is a time in the past, for the first comparison. A costly comparison
// waits longer.
func (b *Known) CompareAt(edition int, made time.Time) time.Time {
	switch {
	case !b.Behind(edition):
		return time.Time{}
	case b.comparedAt.IsZero():
		return made
	default:
		return b.comparedAt.Add(CompareShare * b.cost)
	}
}

// Behind reports whether the generation of an edition has not been compared yet.
func (b *Known) Behind(edition int) bool {
	return b.Base != nil && (b.comparedAt.IsZero() || b.edition != edition)
}

// Compare finds the differences between the generation of an edition and the baseline.
func (b *Known) Compare(edition int, want rules.Generation) {
	start := time.Now()
	b.changes = b.Base.Since(want)
	b.edition, b.comparedAt = edition, time.Now()
	b.cost = b.comparedAt.Sub(start)
}

// Name names the baseline, nil if there is none. While its file is read, or if it is unusable,
// the name says only that.
func (b *Known) Name() *api.BaselineName {
	switch {
	case b.Err != nil:
		return &api.BaselineName{Error: b.Err.Error()}
	case !b.taken:
		return &api.BaselineName{Reading: true}
	case b.Base == nil:
		return nil
	default:
		return &api.BaselineName{Generation: b.stored.ID, Confirmed: b.stored.Confirmed}
	}
}

// Public returns the baseline in the form of a Status; nil if there is none.
func (b *Known) Public() *api.Baseline {
	name := b.Name()
	switch {
	case name == nil:
		return nil
	case b.Base != nil && b.comparedAt.IsZero(), name.Reading:
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

// unconfirmedListed is how many chains with rules outside of the baseline a record names.
const unconfirmedListed = 10

// AddTo adds to a record the lost rules of a table that the baseline lacks. If that is unknown,
// it adds nothing.
func (b *Known) AddTo(r *api.Flush, id rules.TableID, lost reload.Lost) {
	if b.Base == nil {
		return
	}
	n := api.NotInBaseline{BaselineName: *b.Name()}
	if r.NotInBaseline != nil {
		n = *r.NotInBaseline // a copy of the record may be in use
		n.Chains = n.Chains[:len(n.Chains):len(n.Chains)]
	}
	add := func(chain string, list []rules.Rule) {
		lacking := len(b.Base.Lacks(id.Family, id.Name, chain, list))
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

// The limits for rules in a reply. A chain gets at most a tenth, so that a chain full of rules
// hides no other.
const (
	chainsQuoted = 2000
	LinesQuoted  = 5000
	bytesQuoted  = 2 << 20
)

// LogSet logs that the baseline was confirmed or forgotten.
func (b *Known) LogSet(log klog.Logger) {
	if b.Base == nil {
		severity.Notices(log).Info("The baseline was forgotten on request")
	} else {
		severity.Notices(log).Info("A baseline was confirmed on request", "generation", b.stored.ID, "rules", b.stored.Rules, "chains", b.stored.Chains)
	}
}

// List adds the chains that differ to the reply of canaryd baseline, as long as there is room;
// More counts the others. Built-in chains are first, then chains that the baseline knows.
func (b *Known) List(r *api.BaselineReply) {
	rank := func(c rules.ChainChange) int {
		switch {
		case rules.Builtin(c.Table, c.Chain):
			return 0
		case c.Known:
			return 1
		default:
			return 2
		}
	}
	changes := slices.Clone(b.changes)
	sorting.Stable(changes, func(a, b rules.ChainChange) int { return rank(a) - rank(b) })
	left := flushes.Room{Lines: LinesQuoted, Bytes: bytesQuoted}
	for i, c := range changes {
		if i == chainsQuoted {
			r.More = len(changes) - i
			return
		}
		w := flushes.DiffWriter{Room: flushes.Room{Lines: min(left.Lines, LinesQuoted/10), Bytes: min(left.Bytes, bytesQuoted/10)}}
		w.Rules("", c.Chain, c.Appeared)
		left.Lines -= len(w.Diff.Lines)
		for _, line := range w.Diff.Lines {
			left.Bytes -= len(line)
		}
		r.Changes = append(r.Changes, api.BaselineChange{
			Family: c.Family, Table: c.Table, Chain: c.Chain, Known: c.Known, Appeared: len(c.Appeared), Gone: c.Gone, Reordered: c.Reordered,
			Rules: w.Diff.Lines, More: w.Diff.More,
		})
	}
}
