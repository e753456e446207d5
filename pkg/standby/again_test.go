package standby

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nft"
)

// shown is the content of a copy, for a comparison.
func shown(c *Copy) map[string][]string {
	all := map[string][]string{"": {fmt.Sprint(c.marks, c.services)}}
	for name, chain := range c.chains {
		all[name] = append([]string{fmt.Sprint(chain.leftOut, chain.marks, chain.shadow, chain.digests)}, chain.jumps...)
	}
	for h, hook := range c.hooks {
		all[h.String()] = append([]string{fmt.Sprint(hook.blocked, hook.body.digests)}, hook.body.jumps...)
	}
	return all
}

// TestATranslationOfChanges: owners change, add and delete chains. A translation that reads only
// the changed chains must be the same as a translation of all.
func TestATranslationOfChanges(t *testing.T) {
	for seed := range uint64(200) {
		rnd, version := rand.New(rand.NewPCG(seed, 1)), uint64(0)
		bodies, versions := map[string][]nft.Rule{}, map[string]uint64{}
		write := func(name string, body []nft.Rule) {
			version++
			bodies[name], versions[name] = body, version
		}
		// Chain n leads to later ones only, so that there is no loop.
		body := func(n int) (all []nft.Rule) {
			for range rnd.IntN(4) {
				if to := n + 1 + rnd.IntN(6); to < 20 && rnd.IntN(3) > 0 {
					all = append(all, listOf(jump(fmt.Sprintf("KUBE-%d", to))))
				}
			}
			return append(all, listOf(verdictOf(nfAccept)))
		}
		write("KUBE-SERVICES", []nft.Rule{listOf(jump("KUBE-0")), listOf(jump("KUBE-1"))})
		for n := range 20 {
			write(fmt.Sprintf("KUBE-%d", n), body(n))
		}
		var before *Copy
		for turn := range 8 {
			for range rnd.IntN(3) {
				n := rnd.IntN(20)
				write(fmt.Sprintf("KUBE-%d", n), body(n))
			}
			unprotected := ""
			if rnd.IntN(3) == 0 {
				unprotected = fmt.Sprintf("KUBE-%d", 2+rnd.IntN(18))
			}
			src := sourceOf(bodies)
			chains := src.Chains.(nft.ChainMap)
			for name, v := range versions {
				c := chains[name]
				c.Version = v
				chains[name] = c
			}
			src.Protects = func(chain string) bool { return chain != unprotected }
			whole, err := Translate(src, nil)
			if err != nil {
				t.Fatal(err)
			}
			again, err := Translate(src, before)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(shown(whole), shown(again)); diff != "" {
				t.Fatalf("seed %d, turn %d (-whole +of changes):\n%s", seed, turn, diff)
			}
			for name, c := range again.chains {
				if was := before.chainOf(name); (was == nil || !slices.Equal(was.digests, c.digests)) && again.rules[name] == nil {
					t.Fatalf("seed %d, turn %d: chain %s has no rules to write", seed, turn, name)
				}
			}
			held := *again
			held.rules = nil
			before = &held
		}
	}
}

// chainOf returns a chain; nil also of a nil copy.
func (c *Copy) chainOf(name string) *chain {
	if c == nil {
		return nil
	}
	return c.chains[name]
}
