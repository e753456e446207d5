package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLastWordOfAProxyThatWasSyncing: kube-proxy has synced because of one flush, and a second
// flush takes these rules before it plants its canary again. Right after the replay canaryd
// cannot request another sync, and kube-proxy does not look again by itself.
func TestLastWordOfAProxyThatWasSyncing(t *testing.T) {
	const newer = "-p tcp -m tcp --dport 9999 -j KUBE-MARK-MASQ"
	sync := section(rules.Nat, ":KUBE-NODEPORTS - [0:0]", ":KUBE-MARK-MASQ - [0:0]",
		"-A KUBE-NODEPORTS "+newer, "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000")
	for _, test := range []struct {
		name  string
		back  time.Duration // from the flush to the return of its canary
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

// TestASavedMangleDoesNotAnswerForTheProxy: canaryd deletes kube-proxy's canary to request a
// full sync. Before kube-proxy looks, another process restores a file with that canary. canaryd
// requests the sync again, also if the file's rules are flushed at once.
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
