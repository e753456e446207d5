package main

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

func evidence() iptables.Evidence {
	return iptables.Evidence{
		Backend: iptables.Legacy, Reason: "legacy holds 412 rules, so kubelet's hint chain in nft is stale", Mixed: true,
		Counts: map[rules.Family]map[iptables.Backend]iptables.Count{
			rules.IPv4: {iptables.NFT: {Rules: 3, Hint: true}, iptables.Legacy: {Rules: 412}},
			rules.IPv6: {iptables.NFT: {}},
		},
	}
}

func TestDetectTable(t *testing.T) {
	for name, change := range map[string]func(*detected){
		"stale-hint": func(*detected) {},
		"native": func(e *detected) {
			o := options{}
			o.selector, _ = protect.NewSelector([]string{"kube", "nft:inet:*"})
			e.Native = o.nativeFound([]native.Standing{
				{ID: tableid.Inet.Table("firewalld"), Immune: true}, {ID: tableid.Inet.Table("mine")},
				{ID: tableid.IPv4.Table("docker-bridges")}, {ID: tableid.IPv4.Table("kube-proxy")}, {ID: tableid.IPv4.Table("other")}})
		},
		"unguarded": func(e *detected) {
			o := options{protect: []string{"auto", "-docker"}}
			o.selector, _ = protect.NewSelector(o.protect)
			var chains chainsFound
			chains.add(iptables.Legacy, rules.IPv4, rules.Filter, map[string]int{
				"INPUT": 3, "DOCKER": 2, "DOCKER-USER": 1, "KUBE-FORWARD": 4, "KUBE-PROXY-CANARY": 1, "neutron-filter-top": 7, "neutron-openvswi-FORWARD": 1,
				"ufw-user-input": 3, "ufw-before-input": 9, "IN_public": 2, "mine": 5, "a,b": 1, "\x1b[2J": 1})
			chains.add(iptables.Legacy, rules.IPv4, rules.Raw, map[string]int{"PREROUTING": 1, "cali-PREROUTING": 2})
			chains.add(iptables.NFT, rules.IPv4, rules.Filter, map[string]int{"elsewhere": 1})
			e.Protect, e.Unguarded = "auto,-docker", o.unguarded(chains[e.Backend])
			e.Native = o.nativeFound([]native.Standing{{ID: tableid.Inet.Table("firewalld")}, {ID: tableid.Inet.Table("mine")}, {ID: tableid.IPv4.Table("docker-bridges")}})
		},
		"forced": func(e *detected) { e.Evidence = e.Force(iptables.NFT) },
		"one-family": func(e *detected) {
			delete(e.Counts, rules.IPv6)
			e.Mixed = false
		},
	} {
		for _, output := range []string{"table", "json"} {
			t.Run(name+" "+output, func(t *testing.T) {
				e := detected{Evidence: evidence()}
				change(&e)
				var out bytes.Buffer
				if err := printEvidence(&out, output, e); err != nil {
					t.Fatal(err)
				}
				golden(t, "detect-"+name+"-"+output, out.String())
			})
		}
	}
}

// TestDetectExecutesNothing: not even where no program could be executed.
func TestDetectExecutesNothing(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for _, args := range []string{"detect", "detect --backend=legacy", "detect --ip-family=ipv6 -o json"} {
			done := make(chan struct{})
			go func() {
				defer close(done)
				if err := nstest.Without(nstest.LackExec()); err != nil {
					t.Error(err)
				}
				if err := exec.Command("true").Run(); err == nil {
					t.Error("a program could be executed")
				}
				if code, stdout, stderr := call(t, strings.Fields(args)...); code != exitOK || stderr != "" || !strings.Contains(stdout, "ipv6") {
					t.Errorf("canaryd %s: exit code %d, %q, %q", args, code, stdout, stderr)
				}
			}()
			<-done
		}
	})
}

// TestAwaitEvidence: at most 2 s, a look every 200 ms, one line in the log.
func TestAwaitEvidence(t *testing.T) {
	found := evidence()
	for _, test := range []struct {
		name string
		// what is seen from that moment on; before it is nothing.
		after    time.Duration
		evidence iptables.Evidence
		err      error
		sigterm  time.Duration // zero: none

		takes time.Duration
		looks int
		told  bool
	}{
		{name: "rules are there", evidence: found, looks: 1},
		{name: "it cannot be read", err: nft.ErrPermission, looks: 1},
		{name: "nobody comes", after: time.Hour, takes: 2 * time.Second, looks: 11, told: true},
		{name: "kubelet comes", after: 500 * time.Millisecond, evidence: found, takes: 600 * time.Millisecond, looks: 4, told: true},
		{name: "trouble comes", after: 500 * time.Millisecond, err: errors.New("x"), takes: 600 * time.Millisecond, looks: 4, told: true},
		{name: "SIGTERM", after: time.Hour, sigterm: 700 * time.Millisecond, takes: 700 * time.Millisecond, looks: 4, told: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))))
				defer cancel()
				if test.sigterm > 0 {
					time.AfterFunc(test.sigterm, cancel)
				}
				start, looks := time.Now(), 0
				var ready []time.Duration
				awaitEvidence(ctx, func(context.Context) (iptables.Evidence, error) {
					looks++
					if time.Since(start) < test.after {
						return iptables.Evidence{}, nil
					}
					return test.evidence, test.err
				}, func() { ready = append(ready, time.Since(start)) })
				if want := map[bool][]time.Duration{true: {0}}[test.told]; !slices.Equal(ready, want) {
					t.Errorf("the service manager was told to go on after %v, want %v", ready, want)
				}
				if took := time.Since(start); took != test.takes || looks != test.looks {
					t.Errorf("%d looks in %s, want %d in %s", looks, took, test.looks, test.takes)
				}
				lines := strings.Count(log.String(), "\n")
				if want := map[bool]int{true: 1}[test.told]; lines != want {
					t.Errorf("%d lines in the log, want %d:\n%s", lines, want, &log)
				}
			})
		})
	}
}

// TestDetectReadsTheDaemonsWords: a word with a comma and quotes is one word, as the daemon has it.
func TestDetectReadsTheDaemonsWords(t *testing.T) {
	words := []string{"auto", "-docker", `rule:filter:INPUT:*--ctstate NEW,RELATED *--comment "a, b"*`}
	o := options{socket: serveControl(t, guarding{protect: protect.Join(words)})}
	if err := o.takeDaemonsProtect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(words, o.protect); d != "" {
		t.Errorf("words (-want +got):\n%s", d)
	}
}
