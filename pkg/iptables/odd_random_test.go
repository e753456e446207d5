package iptables

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
	"github.com/canaryd/canaryd/pkg/rules"
)

// A restore of iptables' output for a rule yields the same bytes. Otherwise the
// rule is opaque, or the restore refuses it, and a replay finds it by halves.
// CANARYD_ODD_RULES sets how many rules are drawn of each kind of node.
func TestWhatIsPrintedYieldsTheSameBytesOrIsOpaque(t *testing.T) {
	seed, count := directSeed(t), testkit.Size(16, 40)
	if text := os.Getenv("CANARYD_ODD_RULES"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		count = n
	}
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		t.Logf("CANARYD_SEED=%d", seed)
		r := rand.New(rand.NewPCG(seed, uint64(family)))
		inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		var sets []string
		for range 5 {
			set := oddWord(r, 31)
			if _, err := tryTool(t, "", "ipset", "create", set, "hash:ip", "family", inet); err == nil {
				sets = append(sets, set)
			}
		}
		nstest.Command(t, "ipset", "create", "plain", "hash:ip", "family", inet)
		for _, chain := range []string{"MINE", "COPY", "A", "B", "X", "Y", "Z"} {
			iptablesCommand(t, backend, family, "-N "+chain)
		}
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		opaque, same, refused := 0, 0, 0
		for range count {
			args, odd := oddRule(r, family, append(sets, "plain"))
			if !addOdd(t, backend, family, "MINE", args) {
				continue
			}
			rule, bytes := onlyRule(t, k, backend, family, "MINE")
			if _, is := rule.Opaque(); !is && !odd {
				// iptables-nft writes some things in another way than it prints
				// them, such as ! --dport 0:80 and --dport 81:65535. To the
				// kernel they are the same.
				iptablesCommand(t, backend, family, "-F MINE")
				nstest.CommandInput(t, "*filter\n-A MINE "+rule.Spec+"\nCOMMIT\n", program(backend, family, "-restore"), "--noflush")
				rule, bytes = onlyRule(t, k, backend, family, "MINE")
			}
			if _, is := rule.Opaque(); is {
				opaque++
			} else if _, err := tryTool(t, "*filter\n-A COPY "+rule.Spec+"\nCOMMIT\n", program(backend, family, "-restore"), "--noflush"); err != nil {
				refused++
			} else {
				same++
				if copied, other := onlyRule(t, k, backend, family, "COPY"); other != bytes || copied != rule {
					t.Errorf("%q is printed as\n%s\nwhich makes\n%s\nof other bytes: %t", args, rule.Spec, copied.Spec, other != bytes)
				}
			}
			iptablesCommand(t, backend, family, "-F MINE")
			iptablesCommand(t, backend, family, "-F COPY")
		}
		t.Logf("%d opaque, %d the same, %d refused", opaque, same, refused)
		if opaque < count/10 || same < count/10 || refused > count/4 {
			t.Errorf("%d of %d rules were opaque, %d the same, %d refused: too much of one kind", opaque, count, same, refused)
		}
	})
}

// onlyRule returns the one rule of a chain of filter, and an identifier of its
// bytes. The rule is empty unless the chain has exactly one.
func onlyRule(t *testing.T, k *Kernel, backend Backend, family rules.Family, chain string) (rules.Rule, string) {
	t.Helper()
	session := begin(t, k)
	got := mustRead(t, session, family)
	if err := session.Close(); err != nil {
		t.Fatal(err)
	}
	list := got.Tables[rules.Filter].Chain(chain).Rules
	if len(list) != 1 {
		return rules.Rule{}, fmt.Sprint(len(list), " rules")
	}
	if backend == NFT {
		c := k.mirror.families[family].raw.Chain(Place{Table: rules.Filter, Chain: chain})
		return list[0], fmt.Sprint(c.IDs)
	}
	return list[0], fmt.Sprint(bytesOf(t, family, chain))
}

// oddWord draws a word of at most that many bytes.
func oddWord(r *rand.Rand, most int) string {
	parts := []string{"a", "eth0", " ", " ", "-h", "-j ACCEPT", "-M", "src", "\n", "#", `"`, `\`, "!", "+", "\t", "é", "--name", "=", "-", "'", "/x"}
	var b strings.Builder
	for range 1 + r.IntN(5) {
		if part := parts[r.IntN(len(parts))]; b.Len()+len(part) <= most {
			b.WriteString(part)
		}
	}
	if b.Len() == 0 {
		return "a"
	}
	return b.String()
}

// oddRule draws the arguments of a rule: a random rule, or one whose words may be
// odd.
func oddRule(r *rand.Rand, family rules.Family, sets []string) (args []string, odd bool) {
	if r.IntN(3) == 0 {
		return strings.Fields(randrules.Draw(r, family, rules.Filter).Spell(r)), false
	}
	// Without a mask iptables writes a mask of more bits than IPv4 has.
	mask := map[rules.Family]string{rules.IPv4: "255.255.255.255", rules.IPv6: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}[family]
	device := func() string {
		if word := oddWord(r, 15); word != "+" { // it matches all, and is not written
			return word
		}
		return "a"
	}
	for range 1 + r.IntN(2) {
		switch r.IntN(9) {
		case 0:
			args = append(args, "-i", device())
		case 1:
			args = append(args, "-o", device())
		case 2:
			args = append(args, "-m", "comment", "--comment", oddWord(r, 100))
		case 3:
			args = append(args, "-m", "recent", "--rcheck", "--name", oddWord(r, 60), "--mask", mask)
		case 4:
			args = append(args, "-m", "hashlimit", "--hashlimit-upto", "1/sec", "--hashlimit-name", oddWord(r, 15))
		case 5:
			args = append(args, "-m", "string", "--algo", "bm", "--string", oddWord(r, 60))
		case 6:
			args = append(args, "-m", "set", "--match-set", sets[r.IntN(len(sets))], "src")
		case 7:
			args = append(args, "-m", "physdev", "--physdev-in", oddWord(r, 15))
		case 8:
			args = append(args, "-m", "helper", "--helper", oddWord(r, 29))
		}
	}
	if r.IntN(3) == 0 {
		return append(args, "-j", "LOG", "--log-prefix", oddWord(r, 29)), true
	}
	return append(args, "-j", []string{"ACCEPT", "DROP", "RETURN", "X"}[r.IntN(4)]), true
}
