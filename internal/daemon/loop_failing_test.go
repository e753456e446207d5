package daemon

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
)

// wantFailing fails unless headline and readiness give the reason of the failing replay, with
// advice.
func (r *rig) wantFailing(reason, advice string) {
	r.t.Helper()
	s := r.d.Status()
	if len(s.Failing) != 1 {
		r.t.Fatalf("the failing replays are %+v, want one; %q", s.Failing, s.Headline)
	}
	f := s.Failing[0]
	if f.Reason != reason || f.Advice != advice || f.Attempts == 0 || f.Flush == "" || f.Retry.IsZero() {
		r.t.Errorf("the replay fails as %+v, want reason %q and advice %q", f, reason, advice)
	}
	for face, text := range map[string]string{"headline": s.Headline, "readiness": s.Ready().Error()} {
		if !strings.Contains(text, f.String()) {
			r.t.Errorf("the %s is %q, without %q", face, text, f)
		}
	}
}

// wantNoFailing fails if a replay is said to fail.
func (r *rig) wantNoFailing() {
	r.t.Helper()
	if s := r.d.Status(); len(s.Failing) > 0 || strings.Contains(s.Headline, "the replay fails") {
		r.t.Errorf("%+v in %q", s.Failing, s.Headline)
	}
}

// TestAFailingReplaySaysWhy: headline and readiness have the reason and the advice while a
// replay fails, until the loss ends or a pause begins.
func TestAFailingReplaySaysWhy(t *testing.T) {
	refuse := func(reason iptables.Reason) func(*rig) func() {
		return func(r *rig) func() {
			r.fake.FailRestores(-1, reason)
			return func() { r.fake.FailRestores(0, "") }
		}
	}
	for _, tt := range []struct {
		name           string
		fault          func(*rig) (over func())
		reason, advice string
	}{
		{"a set", refuse(iptables.ReasonMissingSet), "a rule names an ipset that is missing", "create the set"},
		{"a target", refuse(iptables.ReasonMissingChain), "a rule leads to a chain or a target that is missing",
			"load the target's kernel module, or restart the chain's owner"},
		{"words", refuse(iptables.ReasonParse), "iptables does not understand a rule", "see whether iptables was changed on this node"},
		{"foreign rules", refuse(iptables.ReasonIncompatible), "a table holds chains or rules that iptables cannot read", "nft list ruleset shows them; remove them"},
		{"no iptables", refuse(iptables.ReasonNotInstalled), "a rule can be written by iptables only, which is not installed",
			"install the package iptables, and restart canaryd"},
		{"the kernel", refuse(iptables.ReasonOther), "iptables or the kernel refuses the rules", keepsTrying},
		{"the lock", func(r *rig) func() { return r.fake.HoldLock() }, "another process holds the xtables lock", "fuser -v /run/xtables.lock names it"},
		{"lies", func(r *rig) func() { r.fake.Lie(1000); return func() { r.fake.Lie(0) } }, "after the write the rules are not in force", keepsTrying},
	} {
		t.Run(tt.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				if tt.name == "the lock" && backend == iptables.NFT {
					return // no write on nft takes the lock
				}
				r := start(t, backend, setup{})
				r.wantNoFailing()
				before, left := r.tables(), leftBy(t, backend, "flush-nat")
				r.flushNat()
				over := tt.fault(r)
				r.after(20 * time.Second)
				r.wantFailing(tt.reason, tt.advice)
				must(t, errorOf(r.d.Pause(t.Context(), api.PauseRequest{Seconds: 3600})))
				r.after(time.Second)
				r.wantNoFailing()
				must(t, errorOf(r.d.Resume(t.Context())))
				r.after(20 * time.Second)
				r.wantFailing(tt.reason, tt.advice)
				over()
				r.after(2 * pace.LastTry)
				r.wantBack(before, left)
				r.wantNoFailing()
			})
		})
	}
}

// TestAFailingNativeReplaySaysWhy is the same for native tables.
func TestAFailingNativeReplaySaysWhy(t *testing.T) {
	for _, tt := range []struct {
		name           string
		fault          error
		reason, advice string
	}{
		{"no right", nft.ErrPermission, "the kernel refuses canaryd access to the tables", "give it CAP_NET_ADMIN in the network namespace"},
		{"no memory", &nft.RefusedError{Errno: syscall.ENOMEM}, "the kernel has no memory for the rules", "raise the memory limit of canaryd's group"},
		{"another errno", &nft.RefusedError{Errno: syscall.EOPNOTSUPP}, "the kernel says: operation not supported", keepsTrying},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.flushTable(proxyTable)
				k.with(func() { k.brokenWrites = tt.fault })
				r.after(20 * time.Second)
				r.wantFailing(tt.reason, tt.advice)
				k.with(func() { k.brokenWrites = nil })
				r.after(time.Minute)
				r.wantNoFailing()
				if s := r.d.Status(); !s.Healthy || s.Flushes[0].Outcome == api.Pending {
					t.Errorf("%q, the record says %s", s.Headline, s.Flushes[0].Outcome)
				}
			})
		})
	}
}
