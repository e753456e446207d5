package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLastWordOfAProxyThatWasSyncing: a flush takes what kube-proxy wrote a moment ago
// because of an earlier flush, before it planted its canary again. Nothing can ask it for
// another sync right after the replay, and by itself it never looks again.
func TestLastWordOfAProxyThatWasSyncing(t *testing.T) {
	const newer = "-p tcp -m tcp --dport 9999 -j KUBE-MARK-MASQ"
	sync := section(rules.Nat, ":KUBE-NODEPORTS - [0:0]", ":KUBE-MARK-MASQ - [0:0]",
		"-A KUBE-NODEPORTS "+newer, "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000")
	for _, test := range []struct {
		name  string
		back  time.Duration // when its canary is back, from the flush
		asked bool
	}{
		{"its canary is back at once", 300 * time.Millisecond, true},
		{"its canary is back in time", 14 * time.Second, true},
		{"it has looked since", 20 * time.Second, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				for _, table := range protect.Always() {
					r.write(table, ":KUBE-PROXY-CANARY - [0:0]", "-X KUBE-PROXY-CANARY")
				}
				r.after(20 * time.Second)
				must(t, r.fake.As(77, "kube-proxy").RestoreNoflush(rules.IPv4, sync))
				r.flushNat()
				r.after(test.back)
				r.wantReady()
				r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
				r.after(5 * time.Second)
				if got := r.chain(rules.IPv4, rules.Mangle, "KUBE-PROXY-CANARY") == nil; got != test.asked {
					t.Fatalf("kube-proxy is asked for a full sync: %t, want %t", got, test.asked)
				}
				must(t, r.fake.As(77, "kube-proxy").RestoreNoflush(rules.IPv4, sync))
				r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
				r.after(20 * time.Second)
				r.wantReady()
				if r.chain(rules.IPv4, rules.Mangle, "KUBE-PROXY-CANARY") == nil {
					t.Error("kube-proxy is asked more than once")
				}
			})
		})
	}
}

// TestASavedMangleDoesNotAnswerForTheProxy: kube-proxy was asked for a full sync, by
// deleting its canary, and before it looks another process restores a file that brings the canary
// back. It is asked once more, also if the file's rules are flushed at once.
func TestASavedMangleDoesNotAnswerForTheProxy(t *testing.T) {
	for name, flushed := range map[string]bool{"restored": false, "restored and flushed": true} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				for _, table := range protect.Always() {
					r.write(table, ":KUBE-PROXY-CANARY - [0:0]")
				}
				r.after(20 * time.Second)
				saved := r.fake.SaveTable(rules.IPv4, rules.Mangle)
				asked := func() bool { return r.chain(rules.IPv4, rules.Mangle, "KUBE-PROXY-CANARY") == nil }
				r.flushNat()
				r.after(time.Second)
				if !asked() {
					t.Fatal("kube-proxy is not asked after the first flush")
				}
				must(t, r.fake.Restore(rules.IPv4, saved))
				if flushed {
					r.after(12 * time.Millisecond)
					must(t, r.fake.Flush(rules.IPv4, rules.Mangle, ""))
				}
				r.after(time.Second)
				r.wantReady()
				if !asked() {
					t.Error("the saved canary stands for kube-proxy's answer")
				}
				r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
				r.after(time.Minute)
				r.wantReady()
				if asked() {
					t.Error("kube-proxy is asked although it has answered")
				}
			})
		})
	}
}
