package iptables

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// manyChains is more than the mirror reads one by one.
const manyChains = 128

// markedRules is a restore that leaves n marks in each of many chains, but none
// in every third. Marks need no program to print them.
func markedRules(n, none int) string {
	var chains, marks strings.Builder
	for i := range manyChains {
		fmt.Fprintf(&chains, ":CHAIN%d - [0:0]\n", i)
		for rule := range n {
			if i%3 != none {
				fmt.Fprintf(&marks, "-A CHAIN%d -m comment --comment canaryd-%d\n", i, rule)
			}
		}
	}
	return "*nat\n" + chains.String() + marks.String() + "COMMIT\n"
}

func restoreNFT(ctx context.Context, text string) error {
	cmd := exec.CommandContext(ctx, "iptables-nft-restore", "--noflush")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// One dump reads a table that has mostly changed: rules, empty chains, and new
// chains.
func TestMirrorReadsTablesWhole(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft-restore")
		k := openKernel(t, Config{Backend: NFT})
		for turn := range 4 {
			if err := restoreNFT(t.Context(), markedRules(1+turn, turn%3)); err != nil {
				t.Fatal(err)
			}
			wantAsSaved(t, k, rules.IPv4, fmt.Sprint("restore ", turn))
		}
		for i := 0; i < manyChains; i += 2 {
			iptablesCommand(t, NFT, rules.IPv4, fmt.Sprintf("-t nat -F CHAIN%d", i))
		}
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -X CHAIN0")
		wantAsSaved(t, k, rules.IPv4, "the half is emptied, and one deleted")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -F")
		wantAsSaved(t, k, rules.IPv4, "everything is emptied")
		if err := restoreNFT(t.Context(), "*nat\n-A CHAIN4 -m comment --comment canaryd-4\nCOMMIT\n"); err != nil {
			t.Fatal(err)
		}
		wantAsSaved(t, k, rules.IPv4, "one rule after that")
	})
}

// The kernel continues a dump by the number of rules that it has sent. A writer
// may change the number of earlier rules, even before its commit. Then the kernel
// leaves out or repeats rules of chains that the writer never touched. No read
// may do so.
func TestMirrorWholeBesideBusyWriter(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft-restore")
		k := openKernel(t, Config{Backend: NFT})
		busy := func(n int) string {
			return "*nat\n:BUSY - [0:0]\n" + strings.Repeat("-A BUSY -m comment --comment canaryd-b\n", n) + "COMMIT\n"
		}
		const each = 12 // rules: some dozen datagrams in all
		for _, text := range []string{busy(1), markedRules(each, -1)} {
			if err := restoreNFT(t.Context(), text); err != nil {
				t.Fatal(err)
			}
		}
		ctx, stop := context.WithCancel(t.Context())
		wrote := make(chan error, 1)
		go func() {
			for turn := 0; ; turn++ {
				if err := restoreNFT(context.WithoutCancel(ctx), busy(1+turn%2*100)); err != nil || ctx.Err() != nil {
					wrote <- err
					stop()
					return
				}
			}
		}()
		commits := map[uint64]bool{}
		for len(commits) < testkit.Size(40, 200) {
			if ctx.Err() != nil {
				t.Fatal("the writer: ", <-wrote)
			}
			k.mirror.families[rules.IPv4].raw.ForgetAll()
			s := mustRead(t, k, rules.IPv4)
			commits[s.Digest] = true
			for _, c := range s.Tables[rules.Nat].Chains {
				for i, r := range c.Rules {
					if strings.HasPrefix(c.Name, "CHAIN") && (len(c.Rules) != each || !strings.HasSuffix(r.Spec, fmt.Sprintf("canaryd-%d\"", i))) {
						t.Fatalf("chain %s, which nobody touches, is read as %v", c.Name, c.Rules)
					}
				}
			}
		}
		stop()
		if err := <-wrote; err != nil {
			t.Error(err)
		}
		wantAsSaved(t, k, rules.IPv4, "the writer")
	})
}
