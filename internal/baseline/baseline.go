// Package baseline compares the guarded content with content that an operator has confirmed, and
// reports newer rules. No decision about a flush depends on it.
//
// A [Content] has the rules of iptables' tables and the native tables. [Of] prepares the stored
// baseline, and takes up to 0.3 s, so call it outside of the loop. [Known.Compare] compares one
// edition of the content, at the time that [Known.CompareAt] returns. [Known.Public], [Known.List]
// and [Known.AddTo] report the result in a status, a reply and a flush record. A [Base] alone
// marks the rules of a preview.
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
	Base   *Base // nil: there is none, or its file cannot be trusted
	Err    error // why it cannot be trusted

	edition    int // of the last compared content
	comparedAt time.Time
	cost       time.Duration
	counts     api.Baseline // of the last comparison, without a name
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
	base := newBase(&stored)
	counts := api.Baseline{Rules: stored.Rules, Chains: stored.Chains, NativeTables: len(stored.Native)}
	stored.Generation, stored.Native = nil, nil
	return Known{taken: true, stored: stored, Base: base, counts: counts}
}

// None returns the Known without a baseline.
func None() Known { return Known{taken: true} }

// CompareAt returns when the content of an edition must be compared with the baseline; zero
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

// Behind reports whether the content of an edition has not been compared yet.
func (b *Known) Behind(edition int) bool {
	return b.Base != nil && (b.comparedAt.IsZero() || b.edition != edition)
}

// Compare finds the differences between the content of an edition and the baseline. It keeps only
// their counts.
func (b *Known) Compare(edition int, now *Content) {
	start := time.Now()
	b.counts = count(b.counts, b.Base.since(now))
	b.edition, b.comparedAt = edition, time.Now()
	b.cost = b.comparedAt.Sub(start)
}

// count replaces the counts of differences in c.
func count(c api.Baseline, changes []*change) api.Baseline {
	c = api.Baseline{Rules: c.Rules, Chains: c.Chains, NativeTables: c.NativeTables}
	for _, x := range changes {
		switch {
		case x.kind == wholeTable && x.known:
			c.GoneTables++
		case x.kind == wholeTable:
			c.AppearedTables++
		case x.kind != "":
			c.AppearedParts += len(x.appeared)
			c.GoneParts += x.gone
		default:
			c.AppearedRules += len(x.appeared)
			c.GoneRules += x.gone
			if len(x.appeared) > 0 {
				c.AppearedChains++
			}
			if x.reordered {
				c.ReorderedChains++
			}
		}
	}
	return c
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
	p := b.counts
	p.BaselineName = *name
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
	n := b.begin(r)
	add := func(chain string, list []rules.Rule) {
		addChain(&n, api.ChainName{Family: id.Family, Table: id.Name, Chain: strings.Clone(chain), Rules: len(b.Base.Lacks(id, chain, list))})
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

// AddNative is AddTo for native tables. A table that the baseline lacks is one entry, without a
// chain.
func (b *Known) AddNative(r *api.Flush, lost []flushes.LostTable) {
	if b.Base == nil || len(lost) == 0 {
		return
	}
	n := b.begin(r)
	n.Native = true
	for _, l := range lost {
		b.Base.eachLacking(l, func(chain string, rules int) {
			addChain(&n, api.ChainName{Family: l.Want.ID.Family, Table: l.Want.ID.Name, Native: true, Chain: strings.Clone(chain), Rules: rules})
		})
	}
	r.NotInBaseline = &n
}

// begin returns the record's lost rules that the baseline lacks, to add more. A copy of the
// record may be in use.
func (b *Known) begin(r *api.Flush) api.NotInBaseline {
	if r.NotInBaseline == nil {
		return api.NotInBaseline{BaselineName: *b.Name()}
	}
	n := *r.NotInBaseline
	n.Chains = slices.Clip(n.Chains)
	return n
}

// addChain adds the rules of a chain to a record, for AddTo.
func addChain(n *api.NotInBaseline, c api.ChainName) {
	n.Rules += c.Rules
	switch {
	case c.Rules == 0:
	case len(n.Chains) == unconfirmedListed:
		n.More++
	default:
		n.Chains = append(n.Chains, c)
	}
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
		severity.Notices(log).Info("A baseline was confirmed on request", "generation", b.stored.ID, "rules", b.stored.Rules, "chains", b.stored.Chains, "nativeTables", b.counts.NativeTables)
	}
}

// List adds the parts of the content that differ to the reply of canaryd baseline, as long as
// there is room; More counts the others. New native tables and built-in chains are first, then
// parts that the baseline knows.
func (b *Known) List(r *api.BaselineReply, now *Content) {
	if b.Base == nil {
		return
	}
	rank := func(c *change) int {
		switch {
		case c.base, c.kind == wholeTable:
			return 0
		case c.known:
			return 1
		default:
			return 2
		}
	}
	changes := b.Base.since(now)
	sorting.Stable(changes, func(a, b *change) int { return rank(a) - rank(b) })
	left := flushes.Room{Lines: LinesQuoted, Bytes: bytesQuoted}
	for i, c := range changes {
		if i == chainsQuoted {
			r.More = len(changes) - i
			return
		}
		row := api.BaselineChange{Family: c.id.Family, Table: c.id.Name, Native: c.native, Kind: c.kind, Chain: c.name,
			Known: c.known, Appeared: len(c.appeared) + c.rules, Gone: c.gone, Reordered: c.reordered, More: c.rules}
		if c.kind != wholeTable {
			w := flushes.DiffWriter{Room: flushes.Room{Lines: min(left.Lines, LinesQuoted/10), Bytes: min(left.Bytes, bytesQuoted/10)}}
			flushes.AddAll(&w, "", c.appeared, c.list.words)
			left.Lines -= len(w.Diff.Lines)
			for _, line := range w.Diff.Lines {
				left.Bytes -= len(line)
			}
			row.Rules, row.More = w.Diff.Lines, w.Diff.More
		}
		r.Changes = append(r.Changes, row)
	}
}
