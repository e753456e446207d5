package iptables

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// fakeEvidence is what the Fake says of the backends. What is written to the
// Fake has no part in it.
type fakeEvidence struct {
	nft, legacy Count
	forced      bool
	stamp       uint64
	err         error
	takes       time.Duration
	weighs      int
}

// SetCounts is what both backends hold from now on, which moves the evidence.
func (f *Fake) SetCounts(nft, legacy Count) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.nft, f.evidence.legacy = nft, legacy
	f.evidence.stamp++
}

// ForceBackend makes the Fake's backend one that was asked for.
func (f *Fake) ForceBackend() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.forced = true
}

// FailEvidence makes Moved and Weigh return err until FailEvidence(nil).
func (f *Fake) FailEvidence(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.err = err
}

// WeighTakes makes every Weigh last that long.
func (f *Fake) WeighTakes(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evidence.takes = d
}

// Weighs returns how often Weigh was called.
func (f *Fake) Weighs() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.evidence.weighs
}

// Evidence returns what speaks for the Fake's backend at first: Info's reason,
// and a hint chain.
func (f *Fake) Evidence() Evidence {
	f.mu.Lock()
	defer f.mu.Unlock()
	return Evidence{
		Backend: f.kind, Reason: f.info.Reason, Mixed: f.info.Mixed,
		Counts: map[rules.Family]map[Backend]Count{f.families[0]: {f.kind: {Hint: true}}},
	}
}

// Moved reports whether SetCounts was called since Weigh returned last, or
// ever if last is Evidence's. Unlike the Kernel's it makes no difference
// between the backends. It fails with FailEvidence's error.
func (f *Fake) Moved(ctx context.Context, last Evidence) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.evidence.err == nil && f.evidence.stamp != last.stamps[f.kind], f.evidence.err
}

// Weigh decides by what SetCounts said. It fails with FailEvidence's error.
func (f *Fake) Weigh(ctx context.Context) (Evidence, error) {
	f.mu.Lock()
	f.evidence.weighs++
	now := f.evidence
	f.mu.Unlock()
	select {
	case <-ctx.Done():
		return Evidence{}, ctx.Err()
	case <-time.After(now.takes):
	}
	if now.err != nil {
		return Evidence{}, now.err
	}
	evidence := Evidence{
		Counts: map[rules.Family]map[Backend]Count{f.families[0]: {NFT: now.nft, Legacy: now.legacy}},
		stamps: map[Backend]uint64{f.kind: now.stamp},
	}
	evidence.decide(true)
	if now.forced {
		evidence = evidence.Force(f.kind)
	}
	return evidence, nil
}
