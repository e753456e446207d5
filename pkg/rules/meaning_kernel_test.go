package rules_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/randrules"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// seed returns the seed of the random rules; CANARYD_SEED sets another.
func seed(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("CANARYD_SEED")
	if text == "" {
		return 1
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("CANARYD_SEED: %v", err)
	}
	return n
}

// TestTheKernelAgreesOnMeaning: a program's rule and the rule that the kernel reports must mean
// the same. Two rules must mean the same exactly if the kernel reports the same text.
func TestTheKernelAgreesOnMeaning(t *testing.T) {
	for _, backend := range []string{"nft", "legacy"} {
		for family, prefix := range map[rules.Family]string{rules.IPv4: "iptables", rules.IPv6: "ip6tables"} {
			t.Run(backend+"/"+family.String(), func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func(t *testing.T) {
					tool := prefix + "-" + backend
					nstest.NeedProgram(t, tool+"-restore", tool+"-save")
					n := seed(t)
					t.Logf("CANARYD_SEED=%d", n)
					for i, table := range protect.Tables() {
						r := rand.New(rand.NewPCG(n, uint64(family)<<8|uint64(i)))
						for range testkit.Size(1, 2) {
							agree(t, r, tool, family, table)
						}
					}
				})
			})
		}
	}
}

var rulesEach = testkit.Size(150, 250) // of three spellings each, in one restore

func agree(t *testing.T, r *rand.Rand, tool string, f rules.Family, table rules.TableName) {
	t.Helper()
	var specs []string
	for range rulesEach {
		w := randrules.Draw(r, f, table)
		specs = append(specs, w.Spell(r), w.Spell(r), w.Mutate(r).Spell(r))
	}
	saved := throughKernel(t, tool, table, specs)
	text, meant := map[string]string{}, map[string]string{} // meaning to text and text to meaning
	wrong := 0
	for i, spec := range specs {
		a, b := rule(t, spec), saved[i]
		switch {
		case !a.Equal(b) || !b.Equal(a):
			t.Errorf("written %s\nsaved   %s\nare not Equal:\n  %s\n  %s", spec, b.Spec, a.Meaning(), b.Meaning())
		case i%3 == 1 && !a.Equal(rule(t, specs[i-1])):
			t.Errorf("two spellings of one rule are not Equal:\n  %s\n  %s", spec, specs[i-1])
		default:
			m := a.Meaning()
			if other, ok := text[m]; ok && other != b.Spec {
				t.Errorf("one meaning, two texts of the kernel:\n  %s\n  %s", other, b.Spec)
			} else if other, ok := meant[b.Spec]; ok && other != m {
				t.Errorf("one text of the kernel, %s, two meanings:\n  %s\n  %s", b.Spec, other, m)
			} else {
				text[m], meant[b.Spec] = b.Spec, m
				continue
			}
		}
		if wrong++; wrong > 20 {
			t.Fatal("and more")
		}
	}
	t.Logf("%s: %d rules written, %d meanings", table, len(specs), len(text))
	printedBack(t, tool, f, table)
}

// printedBack renders a table's content and loads it into empty tables. The kernel must hold
// exactly the same bytes again.
func printedBack(t *testing.T, tool string, f rules.Family, table rules.TableName) {
	t.Helper()
	save := func() rules.Section {
		set := savefile.Tables(t, nstest.Command(t, tool+"-save", "-t", string(table)))
		return rules.Protection{Chain: func(string) bool { return true }}.Extract(set[table], func(rules.Rule) bool { return false })
	}
	before := save()
	nstest.CommandInput(t, fmt.Sprintf("*%s\nCOMMIT\n", table), tool+"-restore")
	if n := save().RuleCount(); n != 0 {
		t.Fatalf("%d rules are left in %s", n, table)
	}
	nstest.CommandInput(t, rules.Render(rules.Generation{f.Table(table): before}, f), tool+"-restore", "--noflush")
	if after := save(); !before.Equal(after) {
		t.Errorf("%s was printed and loaded, and now:\n%s", table, rules.Diff(before, after))
	}
}

// throughKernel writes rules into a chain and returns the saved rules.
func throughKernel(t *testing.T, tool string, table rules.TableName, specs []string) []rules.Rule {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n:X - [0:0]\n:Y - [0:0]\n:Z - [0:0]\n", table)
	for _, s := range specs {
		fmt.Fprintf(&b, "-A X %s\n", s)
	}
	nstest.CommandInput(t, b.String()+"COMMIT\n", tool+"-restore")
	set := savefile.Tables(t, nstest.Command(t, tool+"-save", "-t", string(table)))
	saved := set[table].Chain("X").Rules
	if len(saved) != len(specs) {
		t.Fatalf("%d rules were written and %d saved", len(specs), len(saved))
	}
	return saved
}
