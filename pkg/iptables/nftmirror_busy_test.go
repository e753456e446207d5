package iptables

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A writer never rests. Each Read returns one state that existed: it never mixes
// two commits, and is never older than the last Read or its own digest.
func TestMirrorBesideBusyWriter(t *testing.T) {
	number := regexp.MustCompile(`--comment (\d+)`)
	for _, family := range rules.Families() {
		t.Run(family.String(), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, program(NFT, family, "-restore"))
				k := openKernel(t, Config{Backend: NFT})
				iptablesCommand(t, NFT, family, "-t nat -N START")
				first := mustRead(t, k, family).Digest
				ctx, cancel := context.WithCancel(t.Context())
				wrote := make(chan error, 1)
				go func() {
					wrote <- writeSteadily(ctx, family, uint32(first))
					cancel()
				}()
				for last, seen := 0, map[int]bool{}; len(seen) < testkit.Size(20, 200); {
					if ctx.Err() != nil {
						t.Fatal("the writer: ", <-wrote)
					}
					before := mustStamp(t, k, family).Value
					s := mustRead(t, k, family)
					if s.Digest < before {
						t.Errorf("a read that began at genid %d is of genid %d", before, s.Digest)
					}
					got := map[string]bool{}
					for _, c := range s.Tables[rules.Nat].Chains {
						for _, r := range c.Rules {
							if m := number.FindStringSubmatch(r.Spec); m != nil {
								got[m[1]] = true
							}
						}
					}
					if len(got) == 0 {
						continue
					}
					if len(got) > 1 {
						t.Fatalf("a read mixes the commits %v", got)
					}
					var n int
					for text := range got {
						fmt.Sscan(text, &n)
					}
					// Commit n raised the genid to n.
					if n < last || uint64(n) != s.Digest {
						t.Fatalf("commit %d is read after %d, and called genid %d", n, last, s.Digest)
					}
					last, seen[n] = n, true
				}
				cancel()
				if err := <-wrote; err != nil {
					t.Error(err)
				}
				wantAsSaved(t, k, family, "the writer")
			})
		})
	}
}

// writeSteadily commits as fast as it can. Each commit adds, deletes and changes
// chains, and all rules contain the genid that the commit makes.
func writeSteadily(ctx context.Context, family rules.Family, genid uint32) error {
	for first := genid + 1; ctx.Err() == nil; {
		genid++
		var b strings.Builder
		b.WriteString("*nat\n:A - [0:0]\n:B - [0:0]\n:C - [0:0]\n")
		fmt.Fprintf(&b, ":EVEN%d - [0:0]\n", genid%2)
		for _, chain := range []string{"A", "B", "B", "C", "C", "C", fmt.Sprintf("EVEN%d", genid%2)} {
			fmt.Fprintf(&b, "-A %s -m comment --comment %d -m length --length 7 -j RETURN\n", chain, genid)
		}
		if genid > first {
			fmt.Fprintf(&b, "-F EVEN%d\n-X EVEN%[1]d\n", (genid+1)%2)
		}
		b.WriteString("COMMIT\n")
		cmd := exec.CommandContext(context.WithoutCancel(ctx), program(NFT, family, "-restore"), "--noflush")
		cmd.Stdin = strings.NewReader(b.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

// The surprises are an overflow, a renamed chain, and an unchanged table that
// iptables cannot print.
func TestMirrorSurprises(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		k := openKernel(t, Config{Backend: NFT})
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -N X")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -A OUTPUT -j X")
		wantAsSaved(t, k, rules.IPv4, "the start")

		iptablesCommand(t, NFT, rules.IPv4, "-t nat -E X Y")
		wantAsSaved(t, k, rules.IPv4, "another name")

		since := k.Takings(t.Context()).Since
		many := "*nat\n" + strings.Repeat("-A Y -p tcp -m comment --comment \"more than fits\" -m tcp --dport 80 -j ACCEPT\n", 45_000) + "COMMIT\n"
		for _, text := range []string{many, "*nat\n-F Y\n-A Y -j ACCEPT\nCOMMIT\n"} {
			if err := restoreNFT(t.Context(), text); err != nil {
				t.Fatal(err)
			}
		}
		wantAsSaved(t, k, rules.IPv4, "an overflow")
		if k.Takings(t.Context()).Since == since {
			t.Error("nothing was lost: this shows nothing")
		}

		nstest.Command(t, "nft", "add", "rule", "ip", "nat", "Y", "ct", "state", "vmap", "{ new : accept }")
		iptablesCommand(t, NFT, rules.IPv4, "-t filter -N Z")
		if s := wantAsSaved(t, k, rules.IPv4, "a native rule"); countOpaque(s.Tables[rules.Nat]) != 1 {
			t.Errorf("nat is %v", s.Tables[rules.Nat])
		}
		calls := countPrograms(t, k, rules.IPv4)
		for range 3 {
			mustRead(t, k, rules.IPv4)
		}
		iptablesCommand(t, NFT, rules.IPv4, "-t filter -N ZZ")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -N ZZ")
		mustRead(t, k, rules.IPv4)
		if got := calls(); got != 0 {
			t.Errorf("%d programs were executed though no rule is new", got)
		}
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -F Y")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -A Y -p tcp --dport 7 -j ACCEPT")
		if s := mustRead(t, k, rules.IPv4); countOpaque(s.Tables[rules.Nat]) != 0 || calls() > 1 {
			t.Errorf("after the native rule has gone: %v, %d programs", s.Tables[rules.Nat], calls())
		}
		wantAsSaved(t, k, rules.IPv4, "the native rule has gone")
	})
}

// countPrograms counts executions of the family's programs.
func countPrograms(t *testing.T, k *Kernel, family rules.Family) func() int {
	t.Helper()
	dir := t.TempDir()
	real := k.tools[family]
	standIn(t, k, family, "touch "+dir+"/$$; case $1 in --noflush) exec "+real.restore+" \"$@\";; -t) exec "+real.iptables+" \"$@\";; esac; exec "+program(k.info.Backend, family, "-save"))
	return func() int {
		files, err := filepath.Glob(dir + "/*")
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
}
