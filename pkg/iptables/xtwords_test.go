package iptables

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/randrules"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// entriesOf returns a chain's rules as the lexicon stores them.
func entriesOf(t *testing.T, k *Kernel, family rules.Family, table rules.TableName, chain string) (found []nft.Rule) {
	t.Helper()
	err := k.reader.(xtReader).sockets[family].entries(table, func(info xtInfo, data []byte) error {
		content, err := takeApart(family, info, data)
		if err != nil {
			return err
		}
		for _, piece := range content.named[chain].rules {
			raw, err := nameSets(content.raw(piece).Clone(), k.sets.name)
			if err != nil {
				t.Error(err)
			}
			found = append(found, raw)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// headRules have all conditions of an entry's head, and limits.
var headRules = []string{
	"", "-g Z", "-j Z", "-i abcdefghijklmno -j ACCEPT", "-o abcdefghijklmno+ -j DROP", "! -i eth0 ! -o ve+ ! -p tcp -j RETURN",
	"-s 10.1.2.3 -d 10.0.0.0/9 -i eth0 -o ve+ -p tcp -m tcp --dport 80 -j ACCEPT", "! -s 10.1.2.3 ! -d 10.0.0.0/9", "-f -j Z", "-p udp ! -f",
	"-s fe80::1 -d fd00::/9 -i eth0 -o ve+ -p tcp -m tcp --dport 80 -j ACCEPT", "! -s fe80::1 ! -d fd00::/9",
	"-m limit --limit 5/min -j LOG", "-m limit --limit 7/sec --limit-burst 10", "-m limit --limit 3/hour", "-m limit --limit 10000/sec",
	"-j TRACE",
}

// One bit of an entry's conditions or extensions changes. Then its words change, or it has none,
// apart from nfcache. iptables makes the changed entry from the changed words.
func TestEachBitOfAnEntryIsInTheWords(t *testing.T) {
	seed := directSeed(t)
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		t.Logf("CANARYD_SEED=%d", seed)
		const head, cacheLen = 32, 4 // where the conditions begin in the expressions; nfcache
		at, restore := xtLayoutOf(family), program(Legacy, family, "-restore")
		cache := head + at.targetOffset - cacheLen
		r := rand.New(rand.NewPCG(seed, uint64(family)))
		nstest.CommandInput(t, "*raw\n:X - [0:0]\n:Y - [0:0]\n:Z - [0:0]\nCOMMIT\n", restore, "--noflush")
		var drawn []string
		for _, rule := range headRules {
			drawn = append(drawn, "-A X "+rule+"\n")
		}
		for range testkit.Size(20, 100) {
			drawn = append(drawn, "-A X "+randrules.Draw(r, family, rules.Raw).Spell(r)+"\n")
		}
		restoreEach(t, restore, rules.Raw, drawn)
		changed, words := []nft.Rule(nil), []string(nil)
		met := map[string]bool{}
		for _, raw := range entriesOf(t, k, family, rules.Raw, "X") {
			was, spelled := spell(family, raw)
			if other := raw.Clone(); spelled {
				for i := range other.Expressions {
					if i >= cache && i < cache+cacheLen {
						continue // the kernel ignores it
					}
					for bit := byte(1); bit != 0; bit <<= 1 {
						other.Expressions[i] ^= bit
						now, ok := spell(family, other)
						if ok && now.Spec == was.Spec {
							t.Errorf("%q has byte %d of %x or %x", was.Spec, i, raw.Expressions[i], other.Expressions[i])
						} else if ok && !met[now.Spec] {
							met[now.Spec], changed = true, append(changed, other.Clone())
							words = append(words, now.Spec)
						}
						other.Expressions[i] ^= bit
					}
				}
			}
		}
		r.Shuffle(len(words), func(i, j int) {
			words[i], words[j], changed[i], changed[j] = words[j], words[i], changed[j], changed[i]
		})
		words = words[:min(len(words), testkit.Size(300, 3000))]
		drawn = drawn[:0]
		for _, text := range words {
			drawn = append(drawn, "-A Y "+text+"\n")
		}
		refused := restoreEach(t, restore, rules.Raw, drawn)
		made, taken := entriesOf(t, k, family, rules.Raw, "Y"), 0
		for i, text := range words {
			if reason := refused[i]; reason != nil { // by the kernel, because of a value or a missing chain
				if strings.Contains(reason.Error(), "out of range") {
					t.Errorf("%q is refused: %v", text, reason)
				}
				continue
			}
			got, want := made[taken].Expressions, changed[i].Expressions
			for _, name := range [2]int{at.in, at.out} { // the + behind the mask, which the kernel ignores
				length := bytes.IndexByte(want[head+name+at.inMask-at.in:], 0)
				if length < 16 && got[head+name+length] == '+' {
					want[head+name+length] = '+'
				}
			}
			if taken++; !bytes.Equal(got, want) {
				t.Errorf("%q is\n%x\nand iptables makes\n%x", text, want, got)
			}
		}
		t.Logf("%d of %d words were taken", taken, len(words))
		if taken < len(words)/4 {
			t.Error("too few words were taken")
		}
	})
}
