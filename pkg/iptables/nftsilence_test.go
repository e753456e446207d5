package iptables

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// heard sends the commits of a subscription in words. It ends when a commit makes
// chain LAST, or when commits were missed.
func heard(t *testing.T, s *nft.Subscription) <-chan []string {
	t.Helper()
	all := make(chan []string, 1)
	go func() {
		var words []string
		for {
			commit, err := s.Receive()
			switch {
			case errors.Is(err, nft.ErrOverflow):
				all <- append(words, "missed")
				return
			case err != nil:
				all <- append(words, err.Error())
				return
			case commit.Own:
				words = append(words, "own")
			default:
				words = append(words, commit.Comm)
				if commit.Comm == "ip6tables-nft" {
					all <- words
					return
				}
			}
		}
	}()
	return all
}

// last makes heard return.
func last(t *testing.T) { runTool(t, "", "ip6tables-nft", "-t", "raw", "-N", "LAST") }

func openSubscription(t *testing.T, k *Kernel) *nft.Subscription {
	t.Helper()
	s, err := k.Subscribe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// A large transaction is reported to all but the sending Kernel, which knows its
// own changes.
func TestALargeTransactionIsWrittenSilently(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		k := openKernel(t, Config{Backend: NFT})
		saved, payload := map[rules.Family]string{}, Payload{}
		for _, family := range rules.Families() {
			runTool(t, largeTable(silentFrom), program(NFT, family, "-restore"))
			saved[family] = saveNFT(t, family)
			set := mustRead(t, k, family).Tables
			script := Script{Table: rules.Nat}
			for _, c := range set[rules.Nat].Chains {
				if !rules.Builtin(rules.Nat, c.Name) {
					script.Declare = append(script.Declare, c.Name)
				}
				for _, r := range c.Rules {
					script.Steps = append(script.Steps, Step{Verb: Append, Chain: c.Name, Rule: r})
				}
			}
			payload[family] = []Script{script}
		}
		since := k.Takings(t.Context()).Since
		ours, theirs := heard(t, openSubscription(t, k)), heard(t, openSubscription(t, openKernel(t, Config{Backend: NFT})))
		runTool(t, "delete table ip nat; delete table ip6 nat", "nft", "-f", "-")

		s := begin(t, k)
		for _, family := range rules.Families() {
			mustRead(t, s, family)
		}
		for family, w := range s.Restore(t.Context(), payload) {
			if w.Err != nil || w.Raced || !slices.Equal(w.Direct, []rules.TableName{rules.Nat}) {
				t.Errorf("%v: %+v", family, w)
			}
		}
		for family, want := range saved {
			if mustRead(t, s, family).Moved {
				t.Errorf("%v: our own write is taken for somebody else's", family)
			}
			wantAsSaved(t, k, family, "a silent transaction")
			if diff := cmp.Diff(want, saveNFT(t, family)); diff != "" {
				t.Errorf("%v (-want +got):\n%s", family, diff)
			}
		}
		if k.Takings(t.Context()).Since != since {
			t.Error("the mirror began anew")
		}
		last(t)
		if diff := cmp.Diff([]string{"nft", "ip6tables-nft"}, <-ours); diff != "" {
			t.Errorf("who sent it heard (-want +got):\n%s", diff)
		}
		if got := <-theirs; len(got) != 3 || got[0] != "nft" || got[2] != "ip6tables-nft" {
			t.Errorf("others heard of %q, want three commits, of which the second is that one", got)
		}
	})
}

// largeTable returns a nat table of at least that many rules.
func largeTable(n int) string {
	const each = 8
	var chains, content strings.Builder
	for c := 0; c*each < n; c++ {
		fmt.Fprintf(&chains, ":MANY-%d - [0:0]\n", c)
		fmt.Fprintf(&content, "-A OUTPUT -j MANY-%d\n", c)
		for r := range each {
			fmt.Fprintf(&content, "-A MANY-%d -p tcp -m comment --comment \"rule %d\" -m tcp --dport %d -j RETURN\n", c, r, 1+c*each+r)
		}
	}
	return "*nat\n:OUTPUT ACCEPT [0:0]\n" + chains.String() + content.String() + "COMMIT\n"
}

// A process commits while no process listens. The genid reveals the commit.
func TestWhatIsMissedInTheSilence(t *testing.T) {
	place := Place{Table: rules.Nat, Chain: "OURS"}
	append1 := func(t *testing.T) { runTool(t, "", "iptables-nft", "-t", "nat", "-A", "OURS", "-j", "RETURN") }
	foreign := func(t *testing.T) { runTool(t, "", "iptables-nft", "-t", "filter", "-N", "FOREIGN") }
	tests := []struct {
		name  string
		write func(t *testing.T) error
		want  []string
		anew  bool // the mirror begins again
	}{
		{"the transaction alone", func(t *testing.T) error { append1(t); return nil }, []string{"ip6tables-nft"}, false},
		{"nothing is written", func(*testing.T) error { return nft.ErrStale }, []string{"ip6tables-nft"}, false},
		{"somebody else after it", func(t *testing.T) error { append1(t); foreign(t); return nil }, []string{"missed", "ip6tables-nft"}, true},
		{"somebody else, and it is stale", func(t *testing.T) error { foreign(t); return nft.ErrStale }, []string{"missed", "ip6tables-nft"}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			onNamespace(t, func(t *testing.T) {
				runTool(t, "", "iptables-nft", "-t", "nat", "-N", "OURS")
				k := openKernel(t, Config{Backend: NFT})
				mustRead(t, k, rules.IPv4)
				since := k.Takings(t.Context()).Since
				told := heard(t, openSubscription(t, k))
				var want error
				err := k.mirror.raw.Silently([]nft.Rewrite{{Family: rules.IPv4, Place: place}}, k.subscriptions.All(), func() error {
					want = tt.write(t)
					return want
				})
				if !errors.Is(err, want) {
					t.Errorf("it returns %v, want what was returned to it: %v", err, want)
				}
				wantAsSaved(t, k, rules.IPv4, tt.name)
				if anew := k.Takings(t.Context()).Since != since; anew != tt.anew {
					t.Errorf("the mirror began anew: %t, want %t", anew, tt.anew)
				}
				var words []string
				if tt.anew {
					words = <-told
					told = heard(t, openSubscription(t, k))
				}
				last(t)
				if diff := cmp.Diff(tt.want, append(words, <-told...)); diff != "" {
					t.Errorf("heard (-want +got):\n%s", diff)
				}
			})
		})
	}
}
