package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// checkBackendEvery is how often canaryd checks whether the evidence for the backends has
	// changed. It is also the least time between two evidences that must agree: an upgrade of
	// iptables or a reload of a firewall takes seconds.
	checkBackendEvery = 30 * time.Second
	// checkBackendShare limits reads of both backends to 2 % of a core if these change all the
	// time. A read takes 60 ms for 18,000 rules on nft, 14 ms on legacy.
	checkBackendShare = 49
)

// A BackendChecker says which backend the evidence is for.
type BackendChecker interface {
	// Evidence is the evidence by which the backend in use was chosen.
	Evidence() iptables.Evidence
	// Moved reports, without reading a rule, whether the evidence may be another now.
	Moved(ctx context.Context, last iptables.Evidence) (bool, error)
	// GatherEvidence reads both backends and decides again.
	GatherEvidence(ctx context.Context) (iptables.Evidence, error)
}

// A backendCheck compares the backends while the daemon runs. It has a goroutine of its
// own, so that no flush waits until both backends are read.
type backendCheck struct {
	kernel  Kernel
	last    iptables.Evidence
	confirm bool // last was the first evidence against the backend in use
	wait    time.Duration
	trouble pace.Trouble
}

// run sends new evidence to the loop, which calls takeEvidence, until ctx ends. It logs that
// the backends cannot be compared.
func (s *backendCheck) run(ctx context.Context, found chan<- iptables.Evidence) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(s.wait):
		}
		moved, err := s.check(ctx)
		if ctx.Err() == nil && s.trouble.Report(pace.Warnings(ctx), err, "The backends cannot be compared; canaryd keeps its last result until they can") {
			severity.Notices(klog.FromContext(ctx)).Info("The backends can be compared again")
		}
		if !moved {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case found <- s.last:
		}
	}
}

// check reports whether there is new evidence (s.last), which run then sends to the loop. After
// a failure it tries again, and the last evidence remains.
func (s *backendCheck) check(ctx context.Context) (bool, error) {
	s.wait = checkBackendEvery
	if !s.confirm {
		if moved, err := s.kernel.Moved(ctx, s.last); err != nil || !moved {
			return false, err
		}
	}
	start := time.Now()
	evidence, err := s.kernel.GatherEvidence(ctx)
	s.wait = max(checkBackendEvery, checkBackendShare*time.Since(start))
	if err != nil {
		return false, err
	}
	ours := s.kernel.Info().Backend
	s.confirm = favoursOther(evidence, ours) && !favoursOther(s.last, ours)
	s.last = evidence
	return true, nil
}

// favoursOther reports whether the evidence is for a backend other than ours. Empty evidence
// favours neither.
func favoursOther(e iptables.Evidence, ours iptables.Backend) bool {
	return e.Backend != ours && !e.Empty()
}

// A choice is the newest evidence about the backend in use.
type choice struct {
	reason   string
	mixed    bool
	doubtful bool // the newest evidence is for the other backend
	mismatch bool // so was the one before it
}

// takeEvidence notes new evidence for the status and the log: the other backend may be in use
// by now. It never changes the backend: marks and guarded rules are on the backend with which
// canaryd was started.
func (d *Daemon) takeEvidence(ctx context.Context, st *state, e iptables.Evidence) {
	log, ours := klog.FromContext(ctx), d.cfg.Kernel.Info().Backend
	was, is := st.choice, choice{reason: e.Reason, mixed: e.Mixed, doubtful: favoursOther(e, ours)}
	is.mismatch = is.doubtful && (was.doubtful || was.mismatch)
	switch {
	case is.doubtful && !is.mismatch:
		is.reason = was.reason
	case !is.doubtful && e.Backend != ours:
		is.reason = "iptables' tables hold no rules any more"
	}
	if is.mixed != was.mixed {
		logBothBackends(ctx, e, ours)
	}
	switch {
	case is.mismatch && !was.mismatch:
		severity.Errors(log).Info("The other backend is in use by now, and canaryd does not guard its rules; restart canaryd, or name the right backend with --backend",
			"backend", ours, "evidence", e.Backend, "reason", e.Reason)
	case was.mismatch && !is.mismatch:
		severity.Notices(log).Info("The guarded backend is in use again", "backend", ours, "reason", is.reason)
	}
	st.choice = is
}

// logBothBackends logs that both backends hold rules, or that only one does again.
func logBothBackends(ctx context.Context, e iptables.Evidence, ours iptables.Backend) {
	what, log := "Only one backend holds rules again", severity.Notices(klog.FromContext(ctx))
	if e.Mixed {
		log = severity.Warnings(log)
		what = "Both backends hold rules: packets pass both, and one of them is guarded"
	}
	log.Info(what, "guarded", ours, "nft", e.Total(iptables.NFT).Rules, "legacy", e.Total(iptables.Legacy).Rules)
}
