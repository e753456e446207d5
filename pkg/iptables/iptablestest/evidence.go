package iptablestest

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// evidence holds the Fake's answers about the backends. Writes to the Fake do not change them.
type evidence struct {
	nft, legacy iptables.Count
	forced      bool
	stamp       uint64 // how often the counts were set
	weighed     uint64 // the stamp at the last return of GatherEvidence
	err         error
	takes       time.Duration
	gathered    int
}

// SetCounts sets the counts of both backends, which moves the evidence.
func (f *Fake) SetCounts(nft, legacy iptables.Count) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.nft, f.evidence.legacy = nft, legacy
	f.evidence.stamp++
}

// ForceBackend marks the Fake's backend as forced.
func (f *Fake) ForceBackend() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.forced = true
}

// FailEvidence makes Moved and GatherEvidence return err until FailEvidence(nil).
func (f *Fake) FailEvidence(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.err = err
}

// WeighTakes makes every GatherEvidence last that long.
func (f *Fake) WeighTakes(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.takes = d
}

// EvidenceGathered returns how often GatherEvidence was called.
func (f *Fake) EvidenceGathered() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.evidence.gathered
}

// Evidence returns the first evidence for the Fake's backend: Info's reason, and a hint chain.
func (f *Fake) Evidence() iptables.Evidence {
	f.mu.Lock()
	defer f.mu.Unlock()
	return iptables.Evidence{
		Backend: f.kind, Reason: f.info.Reason, Mixed: f.info.Mixed,
		Counts: map[rules.Family]map[iptables.Backend]iptables.Count{f.families[0]: {f.kind: {Hint: true}}},
	}
}

// Moved reports whether SetCounts was called since the last return of GatherEvidence, or ever
// without one. Unlike Kernel.Moved it does not distinguish the backends. It fails with
// FailEvidence's error.
func (f *Fake) Moved(ctx context.Context, _ iptables.Evidence) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.evidence.err == nil && f.evidence.stamp != f.evidence.weighed, f.evidence.err
}

// GatherEvidence decides by the counts of SetCounts. It fails with FailEvidence's error.
func (f *Fake) GatherEvidence(ctx context.Context) (iptables.Evidence, error) {
	f.mu.Lock()
	f.evidence.gathered++
	now := f.evidence
	f.mu.Unlock()
	select {
	case <-ctx.Done():
		return iptables.Evidence{}, ctx.Err()
	case <-time.After(now.takes):
	}
	if now.err != nil {
		return iptables.Evidence{}, now.err
	}
	evidence := iptables.Evidence{
		Counts: map[rules.Family]map[iptables.Backend]iptables.Count{f.families[0]: {iptables.NFT: now.nft, iptables.Legacy: now.legacy}},
	}
	evidence.Decide(true)
	f.mu.Lock()
	f.evidence.weighed = now.stamp
	f.mu.Unlock()
	if now.forced {
		evidence = evidence.Force(f.kind)
	}
	return evidence, nil
}
