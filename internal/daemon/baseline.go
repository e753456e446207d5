package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/severity"
)

// canaryd learns what stands in protected chains, and puts it back after a flush, whichever
// process wrote it. A baseline shows an operator what came since rules were last
// confirmed. Nothing is done by it: no verdict, no replay and no refusal rests on it.

// loadBaseline reads the baseline, outside of the loop.
func (d *Daemon) loadBaseline() baseline.Known {
	if d.cfg.Store == nil {
		return baseline.None()
	}
	return baseline.Of(d.cfg.Store.LoadBaseline())
}

// takeBaseline takes up what the disk has.
func (d *Daemon) takeBaseline(ctx context.Context, st *state, read baseline.Known) {
	defer close(d.baselineTaken)
	st.baseline = read
	if read.Err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(read.Err, "The confirmed baseline is not believed; rules that appeared since are not shown, and nothing else depends on it",
			"confirmAgain", "canaryd baseline --confirm", "forgetIt", "canaryd baseline --forget")
	}
}

// compareAt returns when the generation is to be compared with the baseline.
func (d *Daemon) compareAt(st *state) time.Time {
	return st.baseline.CompareAt(st.generation.edition, d.made)
}

// compareBaseline finds in what the generation differs from the baseline.
func (st *state) compareBaseline() {
	if edition := st.generation.edition; st.baseline.Behind(edition) {
		st.baseline.Compare(edition, st.want())
	}
}
