package reload

import (
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// mostJumps is how many jumps may follow one another on nf_tables: a built-in chain and 15 below
// it (NFT_JUMP_STACK_SIZE of include/net/netfilter/nf_tables.h, nft_chain_validate). x_tables has no such
// limit.
const mostJumps = 15

// saysTooDeep is what a program prints of a nest that the kernel finds too deep (EMLINK), and, on
// recent kernels, of a loop as well.
const saysTooDeep = "Too many links"

// tangles returns the planned jumps that make a loop, or too deep a nest, together with what stands
// in chains of others, by their text with the reason. A trial finds none of them: each is good alone.
// deep says that the kernel bounds the depth.
func loopsAndDeepNests(plan tablePlan, deep bool) map[string]string {
	t := chainWalk{deep: deep, chains: map[string][]link{}, level: map[string]int{}, bad: map[string]string{}}
	if plan.seen != nil { // else the table does not exist
		for _, c := range plan.seen.Chains {
			t.add(c, false)
		}
	}
	planned := slices.Concat(plan.wrote, plan.merged)
	for _, c := range planned {
		t.add(c, true)
	}
	for _, h := range plan.jumps {
		t.chains[h.Chain] = append(t.chains[h.Chain], link{h.Rule.Target, h.Rule.Spec, true})
	}
	for _, name := range rules.BuiltinChains(plan.table) {
		t.visit(name)
	}
	t.deep = false // what no built-in chain leads to may be as deep as it likes
	clear(t.level)
	for _, c := range planned {
		t.visit(c.Name)
	}
	return t.bad
}

// A jump is one that stands or is planned.
type link struct {
	to, spec string
	planned  bool
}

// A tangle is a walk through the chains of a table, as they would be.
type chainWalk struct {
	deep   bool
	chains map[string][]link
	level  map[string]int // how deep a chain was walked through; more shallow need not be done
	path   []link         // that led here; the first one's to is where the walk began
	bad    map[string]string
}

func (t *chainWalk) add(c rules.Chain, planned bool) {
	jumps := []link{}
	for _, r := range c.Rules {
		if r.Target != "" {
			jumps = append(jumps, link{r.Target, r.Spec, planned})
		}
	}
	t.chains[c.Name] = jumps
}

func (t *chainWalk) visit(name string) {
	t.path = append(t.path[:0], link{to: name})
	t.walk(name)
}

// walk follows the jumps of the path's last chain. It returns how long the path is after which the walk goes
// on: a jump behind it was found bad.
func (t *chainWalk) walk(name string) int {
	here := len(t.path)
	if level, done := t.level[name]; done && level >= here {
		return here
	}
	t.level[name] = here
	for _, j := range t.chains[name] {
		if _, exists := t.chains[j.to]; !exists || j.planned && t.bad[j.spec] != "" {
			continue
		}
		back := here
		t.path = append(t.path, j)
		switch {
		case slices.ContainsFunc(t.path[:here], func(k link) bool { return k.to == j.to }):
			back = t.blame(fmt.Sprintf("it would make a loop of chains that leads back to %s", j.to))
		case t.deep && here > mostJumps:
			back = t.blame(fmt.Sprintf("more than %d jumps would follow one another, and the kernel takes no more", mostJumps))
		default:
			back = t.walk(j.to)
		}
		t.path = t.path[:here]
		if back < here {
			delete(t.level, name) // it was not walked through to its end
			return back
		}
	}
	return here
}

// blame finds the last planned jump of the path bad, and returns how long the path is up to it.
func (t *chainWalk) blame(reason string) int {
	for i := len(t.path) - 1; i > 0; i-- {
		if j := t.path[i]; j.planned {
			t.bad[j.spec] = reason
			return i
		}
	}
	return len(t.path) - 1 // all of it stands, so the kernel takes it
}

// refusedAsTooDeep reports whether a restore was refused for too deep a nest.
func refusedAsTooDeep(err error) bool {
	return err != nil && strings.Contains(err.Error(), saysTooDeep)
}
