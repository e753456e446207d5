package iptablestest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// beforeKernel is a Kernel or a Fake.
type beforeKernel interface {
	kernel
	Before(rules.Family, uint64) map[rules.TableName][]iptables.Snapshot
}

const beforeStart = `*nat
:PREROUTING ACCEPT [0:0]
:CANARY - [0:0]
:PORTS - [0:0]
:POD - [0:0]
-A PREROUTING -j PORTS
-A CANARY -m comment --comment canaryd-canary:00ff
-A PORTS -j RETURN
-A POD -j RETURN
COMMIT
*filter
:CANARY - [0:0]
:OURS - [0:0]
-A CANARY -m comment --comment canaryd-canary:00ff
-A OURS -j RETURN
COMMIT
`

const youngPort = "*nat\n-A PORTS -p tcp -m tcp --dport 81 -j RETURN\nCOMMIT\n"

// TestBefore: a program flushes parts of the tables, step by step. Kernel and Fake must show the
// state right before, but only if it may be needed.
func TestBefore(t *testing.T) {
	type write func(text string)
	for _, test := range []struct {
		name string
		do   func(write)
		// want has, by table, the rules of nat's PORTS in the state before; nil means that none
		// is shown.
		want map[rules.TableName][]string
	}{
		{"a rule is added", func(w write) { w(youngPort) }, nil},
		{"a rule goes, and others stay", func(w write) { w(youngPort); w("*nat\n-D PORTS -j RETURN\nCOMMIT\n") }, nil},
		{"all rules of a table", func(w write) { w(youngPort); w("*nat\n-F\nCOMMIT\n") }, map[rules.TableName][]string{"nat": {"-j RETURN", "81"}}},
		{"all rules of a chain", func(w write) { w(youngPort); w("*nat\n-F PORTS\nCOMMIT\n") }, map[rules.TableName][]string{"nat": {"-j RETURN", "81"}}},
		{"a chain is emptied and deleted by one commit", func(w write) { w("*nat\n-F POD\n-X POD\nCOMMIT\n") }, nil},
		{"a chain is written anew", func(w write) { w("*nat\n:PORTS - [0:0]\n-A PORTS -j ACCEPT\nCOMMIT\n") }, nil},
		{"a jump", func(w write) { w(youngPort); w("*nat\n-D PREROUTING -j PORTS\nCOMMIT\n") }, map[rules.TableName][]string{"nat": {"-j RETURN", "81"}}},
		{"the marks first: that moment stays", func(w write) {
			w(youngPort)
			w("*nat\n-F CANARY\nCOMMIT\n")
			w("*nat\n-D PORTS -j RETURN\nCOMMIT\n")
			w("*nat\n-F\nCOMMIT\n")
		}, map[rules.TableName][]string{"nat": {"-j RETURN", "81", "then", "81"}}},
		{"the marks first, and the chain's owner before the rest", func(w write) {
			w("*nat\n-F CANARY\nCOMMIT\n")
			w(youngPort)
			w("*nat\n-F\nCOMMIT\n")
		}, map[rules.TableName][]string{"nat": {"-j RETURN", "then", "-j RETURN", "81"}}},
		{"the marks again and again: eight moments", func(w write) {
			for range 20 {
				w("*nat\n-F CANARY\nCOMMIT\n")
				w("*nat\n-A CANARY -m comment --comment canaryd-canary:00ff\nCOMMIT\n")
			}
			w(youngPort)
			w("*nat\n-F\nCOMMIT\n")
		}, map[rules.TableName][]string{"nat": append(slices.Repeat([]string{"-j RETURN", "then"}, 7), "-j RETURN", "81")}},
		{"a chain first, the marks later: the later moment", func(w write) {
			w("*nat\n-F POD\nCOMMIT\n")
			w(youngPort)
			w("*nat\n-F\nCOMMIT\n")
		}, map[rules.TableName][]string{"nat": {"-j RETURN", "81"}}},
		{"each table has its own moment", func(w write) {
			w("*filter\n-F\nCOMMIT\n")
			w(youngPort)
			w("*nat\n-F\nCOMMIT\n")
		}, map[rules.TableName][]string{"filter": {"-j RETURN"}, "nat": {"-j RETURN", "81"}}},
		{"policies and counters first", func(w write) {
			w(youngPort)
			w("*nat\n:PREROUTING ACCEPT [0:0]\n-Z\nCOMMIT\n")
			w("*nat\n-F\nCOMMIT\n")
		}, map[rules.TableName][]string{"nat": {"-j RETURN", "81"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			run := func(t *testing.T, k beforeKernel, w write) {
				read := func() uint64 {
					snapshot, err := k.Read(t.Context(), v4)
					must(t, err)
					return snapshot.Digest
				}
				w(beforeStart)
				first := read()
				k.Before(v4, first)
				test.do(w)
				digest := read()
				if early := k.Before(v4, first); len(early) > 0 {
					t.Errorf("the read before the commits shows %v", early)
				}
				got := map[rules.TableName][]string{}
				for name, moments := range k.Before(v4, digest) {
					for i, s := range moments {
						if i > 0 {
							got[name] = append(got[name], "then")
						}
						for _, r := range s.Tables[rules.Nat].Chain("PORTS").Rules {
							got[name] = append(got[name], r.Spec)
						}
					}
				}
				want := map[rules.TableName][]string{}
				for name, list := range test.want {
					for _, spec := range list {
						if spec == "81" {
							spec = "-p tcp -m tcp --dport 81 -j RETURN"
						}
						want[name] = append(want[name], spec)
					}
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("before (-want +got):\n%s", diff)
				}
				if again := k.Before(v4, digest); len(again) > 0 {
					t.Errorf("it is shown again: %v", again)
				}
			}
			t.Run("fake", func(t *testing.T) {
				f := iptablestest.NewFake(iptables.NFT)
				run(t, f, func(text string) {
					if strings.Contains(text, "-Z") {
						return // a Fake has no counters
					}
					must(t, f.RestoreNoflush(v4, text))
				})
			})
			t.Run("kernel", func(t *testing.T) {
				nstest.Run(t, func(t *testing.T) {
					nstest.NeedProgram(t, "iptables-nft")
					k, err := iptables.Open(t.Context(), iptables.Config{Backend: iptables.NFT})
					must(t, err)
					defer func() { must(t, k.Close()) }()
					run(t, k, func(text string) {
						nstest.CommandInput(t, text, "iptables-nft-restore", "--noflush")
					})
				})
			})
		})
	}
}

// TestBeforeOwnCommits: canaryd itself empties a chain; that must not count as a flush.
func TestBeforeOwnCommits(t *testing.T) {
	run := func(t *testing.T, k beforeKernel) {
		session, err := k.Begin(t.Context())
		must(t, err)
		defer func() { must(t, session.Close()) }()
		for _, text := range []string{beforeStart, "*nat\n:PORTS - [0:0]\nCOMMIT\n"} {
			_, err = session.Read(t.Context(), v4)
			must(t, err)
			must(t, session.Restore(t.Context(), iptables.Payload{v4: mustParseScripts(t, text)})[v4].Err)
		}
		snapshot, err := k.Read(t.Context(), v4)
		must(t, err)
		if n := len(snapshot.Tables[rules.Nat].Chain("PORTS").Rules); n != 0 {
			t.Errorf("%d rules are left", n)
		}
		if before := k.Before(v4, snapshot.Digest); len(before) > 0 {
			t.Errorf("a moment is shown: %v", before)
		}
	}
	t.Run("fake", func(t *testing.T) { run(t, iptablestest.NewFake(iptables.NFT)) })
	t.Run("kernel", func(t *testing.T) {
		nstest.Run(t, func(t *testing.T) {
			nstest.NeedProgram(t, "iptables-nft")
			k, err := iptables.Open(t.Context(), iptables.Config{Backend: iptables.NFT})
			must(t, err)
			defer func() { must(t, k.Close()) }()
			run(t, k)
		})
	})
}

// TestBeforeOfRulesWithoutWords: a flush deletes a rule that canaryd cannot spell; the state
// before must have its bytes. For a rule with an ipset's number nothing may be shown, because
// the number's name is not certain.
func TestBeforeOfRulesWithoutWords(t *testing.T) {
	for _, test := range []struct {
		name, prepare, rule string
		shown               bool
	}{
		{"a match that is not decoded", "true", "-p udp -m cpu --cpu 0 -j RETURN", true},
		{"an ipset", "ipset create young hash:ip", "-m set --match-set young src -j RETURN", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft", "ipset")
				k, err := iptables.Open(t.Context(), iptables.Config{Backend: iptables.NFT})
				must(t, err)
				defer func() { must(t, k.Close()) }()
				restore := func(text string) { nstest.CommandInput(t, text, "iptables-nft-restore", "--noflush") }
				restore(beforeStart)
				_, err = k.Read(t.Context(), v4)
				must(t, err)
				nstest.Command(t, "sh", "-c", test.prepare)
				restore(fmt.Sprintf("*nat\n-A PORTS %s\nCOMMIT\n", test.rule))
				restore("*nat\n-F\nCOMMIT\n")
				snapshot, err := k.Read(t.Context(), v4)
				must(t, err)
				before := k.Before(v4, snapshot.Digest)[rules.Nat]
				if shown := len(before) == 1; shown != test.shown {
					t.Fatalf("%d moments are shown, want one: %t", len(before), test.shown)
				}
				for _, b := range before {
					if r := b.Tables[rules.Nat].Chain("PORTS").Rules; !slices.ContainsFunc(r, rules.Rule.HasBytes) {
						t.Errorf("no rule has bytes: %+v", r)
					}
				}
			})
		})
	}
}
