package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

// snapshot returns a family's tables with these rules.
func snapshot(t *testing.T, f rules.Family, lines map[rules.TableName][]string) iptables.Snapshot {
	t.Helper()
	s := iptables.Snapshot{Family: f, Tables: rules.Ruleset{}}
	for name, list := range lines {
		table := rules.NewTable(name)
		for _, line := range list {
			chain, spec, _ := strings.Cut(line, " ")
			if table.Chain(chain) == nil {
				table.Add(rules.Chain{Name: chain})
			}
			r, err := rules.ParseRule(spec)
			if err != nil {
				t.Fatal(err)
			}
			c := table.Chain(chain)
			c.Rules = append(c.Rules, r)
		}
		s.Tables[name] = table
	}
	return s
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
			e.Protect, e.unguardedFound = "auto,-docker", o.unguarded([]iptables.Snapshot{snapshot(t, rules.IPv4, map[rules.TableName][]string{
				rules.Filter: {
					"INPUT -j mine", "INPUT -j ufw-user-input", "INPUT", "INPUT -j DROP",
					"DOCKER -j RETURN", "DOCKER -j RETURN", "DOCKER-USER -j RETURN", "KUBE-FORWARD -j led", "KUBE-PROXY-CANARY -j RETURN", "neutron-filter-top -j RETURN",
					"neutron-openvswi-FORWARD -j RETURN", "ufw-user-input -j RETURN", "ufw-before-input -j RETURN", "IN_public -j RETURN", "mine -j RETURN", "a,b -j RETURN",
					"led -j RETURN", "declared -j RETURN",
				},
				rules.Raw: {"PREROUTING -j cali-PREROUTING", "cali-PREROUTING -j RETURN", "PREROUTING -d 127.0.0.1/32 ! -i lo -p tcp -m tcp --dport 80 -j DROP"},
			})}, rules.Generation{rules.IPv4.Table(rules.Filter): {Chains: []rules.Chain{{Name: "declared"}}}})
			e.Native = o.nativeFound([]native.Standing{{ID: tableid.Inet.Table("firewalld")}, {ID: tableid.Inet.Table("mine")}, {ID: tableid.IPv4.Table("docker-bridges")}})
		},
		"rules": func(e *detected) {
			o := options{protect: []string{"auto"}}
			o.selector, _ = protect.NewSelector(o.protect)
			lines := map[rules.TableName][]string{
				rules.Filter: {
					"FORWARD -i wg0 -j ACCEPT", "FORWARD -o wg0 -j ACCEPT", "FORWARD -i eth1 -o eth2 -j ACCEPT", "FORWARD -i eth1 -o eth2 -j ACCEPT",
					"INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "INPUT -j INPUT_ZONES", "INPUT_ZONES -j RETURN",
					`INPUT -p tcp -m comment --comment "\x1b[2Jshop, \"web\"" -j ACCEPT`, "INPUT -p tcp -m multiport --dports 22,80 -j REJECT",
					"INPUT -m comment --comment \"x\x01y\" -j DROP", "INPUT -m string --string " + strings.Repeat("long", 80) + " --algo bm -j DROP", "INPUT",
				},
				rules.Nat: {"PREROUTING -d 169.254.169.254/32 -i cali+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.10:8181", "POSTROUTING -s 10.66.66.0/24 -o eth0 -j MASQUERADE"},
				rules.Raw: {"PREROUTING -d 127.0.0.1/32 ! -i lo -p tcp -m tcp --dport 80 -j DROP"},
			}
			six := map[rules.TableName][]string{rules.Filter: lines[rules.Filter][:2:2]}
			for i := range 300 {
				six[rules.Filter] = append(six[rules.Filter], fmt.Sprintf("INPUT -s 2001:db8::%d/128 -j DROP", i))
			}
			e.Protect, e.unguardedFound = "auto", o.unguarded([]iptables.Snapshot{snapshot(t, rules.IPv4, lines), snapshot(t, rules.IPv6, six)}, nil)
			e.Unknown = []string{"ipv6 mangle: it says \x1b[2J"}
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

// TestDetectIsBounded: of thousands of rules detect prints a few lines, each with the beginning
// of a long rule, and counts all rules.
func TestDetectIsBounded(t *testing.T) {
	o := options{}
	o.selector, _ = protect.NewSelector([]string{"auto"})
	var lines []string
	for i := range 3000 {
		lines = append(lines, fmt.Sprintf("OUTPUT -o x%d --x%d %s", i, i, strings.Repeat("ä", 300)))
	}
	found := o.unguarded([]iptables.Snapshot{snapshot(t, rules.IPv4, map[rules.TableName][]string{rules.Security: lines})}, nil)
	if found.NotGuarded.Rules != 3000 || len(found.Rules) != ruleLines || found.More != 3000-ruleLines {
		t.Errorf("%d rules, %d lines, %d more", found.NotGuarded.Rules, len(found.Rules), found.More)
	}
	for output, most := range map[string]int{"table": 50_000, "json": 200_000} {
		var out bytes.Buffer
		if err := printEvidence(&out, output, detected{Evidence: evidence(), unguardedFound: found}); err != nil || out.Len() > most {
			t.Errorf("%s has %d bytes, error %v", output, out.Len(), err)
		}
	}
}

// TestDetectWithoutPrograms: no program can be executed. detect still has the evidence, and
// says that it could not read unguarded rules. Without rules it says nothing.
func TestDetectWithoutPrograms(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-"+string(backend))
				without := func(args string) string {
					t.Helper()
					said := make(chan string)
					go func() {
						if err := nstest.Without(nstest.LackExec()); err != nil {
							t.Error(err)
						}
						if err := exec.Command("true").Run(); err == nil {
							t.Error("a program could be executed")
						}
						code, stdout, stderr := call(t, strings.Fields(args)...)
						if code != exitOK || stderr != "" || !strings.Contains(stdout, "ipv6") {
							t.Errorf("canaryd %s: exit code %d, %q, %q", args, code, stdout, stderr)
						}
						said <- stdout
					}()
					return <-said
				}
				const unknown = "is not known"
				for _, args := range []string{"detect", "detect --backend=legacy", "detect --ip-family=ipv6 -o json"} {
					if stdout := without(args); strings.Contains(stdout, unknown) || strings.Contains(stdout, "unguardedUnknown") {
						t.Errorf("canaryd %s without rules: %s", args, stdout)
					}
				}
				nstest.Command(t, "iptables-"+string(backend), "-A", "INPUT", "-j", "DROP")
				if stdout := without("detect"); !strings.Contains(stdout, unknown) || !strings.Contains(stdout, "backend  "+string(backend)) {
					t.Errorf("with a rule: %s", stdout)
				}
				if code, stdout, stderr := call(t, "detect"); code != exitOK || !strings.Contains(stdout, "rule:filter:INPUT:-j DROP") {
					t.Errorf("with programs: exit code %d, %q, %q", code, stdout, stderr)
				}
			})
		})
	}
}

// TestAwaitEvidence: the wait takes at most 2 s, with a look every 200 ms and one line in the
// log.
func TestAwaitEvidence(t *testing.T) {
	found := evidence()
	for _, test := range []struct {
		name string
		// the evidence from that moment on; before it is empty
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

// TestDetectReadsTheDaemonsWords: a word of the daemon with a comma and quotes stays one word.
func TestDetectReadsTheDaemonsWords(t *testing.T) {
	words := []string{"auto", "-docker", `rule:filter:INPUT:*--ctstate NEW,RELATED *--comment "a, b"*`}
	o := options{socket: serveControl(t, guarding{protect: protect.Join(words)})}
	if daemons, err := o.takeDaemonsProtect(t.Context()); err != nil || !daemons {
		t.Fatalf("the words are a daemon's: %t, %v", daemons, err)
	}
	if d := cmp.Diff(words, o.protect); d != "" {
		t.Errorf("words (-want +got):\n%s", d)
	}
}

// TestDetectReadsTheDaemonsChains: a chain that a file declares is guarded, regardless of the
// words. If the daemon does not answer, detect says so and lists the rest.
func TestDetectReadsTheDaemonsChains(t *testing.T) {
	o := options{families: rules.Families()}
	o.socket = serveControl(t, guarding{generation: "# a comment\n\n*filter\n:declared - [0:0]\n-A INPUT -j declared\n-A declared -j RETURN\nCOMMIT\n*nat\n:other - [0:0]\nCOMMIT\n"})
	got, err := o.daemonsChains(t.Context())
	want := rules.Generation{rules.IPv4.Table(rules.Filter): {Chains: []rules.Chain{{Name: "declared"}}}, rules.IPv4.Table(rules.Nat): {Chains: []rules.Chain{{Name: "other"}}}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("error %v, chains (-want +got):\n%s", err, d)
	}
	nstest.Run(t, func(t *testing.T) {
		o := options{families: rules.Families(), socket: serveControl(t, guarding{})}
		if found := o.findUnguarded(t.Context(), iptables.NFT, true); len(found.Unknown) != 1 || !strings.Contains(found.Unknown[0], "no generation") {
			t.Errorf("found %+v", found)
		}
	})
}
