package reload

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// mostJumps is how many jumps may follow one another on nf_tables: a built-in chain and 15 below it
// (NFT_JUMP_STACK_SIZE of include/net/netfilter/nf_tables.h, nft_chain_validate). x_tables has no
// such limit.
const mostJumps = 15

// saysTooDeep is the error text for chains that are nested too deep (EMLINK). Recent kernels also
// use it for a loop.
const saysTooDeep = "Too many links"

// loopsAndDeepNests returns the planned rules that close a loop of chains or nest them too deep, by
// text with the reason. The other links may be in chains of other owners. A trial finds none of
// these rules, because each one is good alone. deep says that the kernel bounds the depth.
func loopsAndDeepNests(plan tablePlan, deep bool) reasons {
	t := chainWalk{deep: deep, chains: map[string][]link{}, level: map[string]int{}, bad: reasons{}}
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
		t.chains[h.Chain] = append(t.chains[h.Chain], link{h.Rule.Target, h.Rule.Key(), true})
	}
	for _, name := range rules.BuiltinChains(plan.table) {
		t.visit(name)
	}
	t.deep = false // chains that no built-in chain leads to may be nested as deep as they like
	clear(t.level)
	for _, c := range planned {
		t.visit(c.Name)
	}
	return t.bad
}

// A link is a rule that leads to another chain. It is in force, or planned.
type link struct {
	to      string
	rule    rules.Key
	planned bool
}

// A chainWalk walks through the chains of a table as they would be after the write.
type chainWalk struct {
	deep   bool
	chains map[string][]link
	level  map[string]int // the depth at which a chain was walked; a lower depth needs no second walk
	path   []link         // the links that led here; the first one's target is where the walk began
	bad    reasons
}

// add adds the links of a chain, and replaces its former links: a planned chain replaces the
// chain in force.
func (t *chainWalk) add(c rules.Chain, planned bool) {
	jumps := []link{}
	for _, r := range c.Rules {
		if r.Target != "" {
			jumps = append(jumps, link{r.Target, r.Key(), planned})
		}
	}
	t.chains[c.Name] = jumps
}

func (t *chainWalk) visit(name string) {
	t.path = append(t.path[:0], link{to: name})
	t.walk(name)
}

// walk follows the links of the chain with that name, the path's last one. It returns the
// length of the path where the walk continues: shorter than now if an earlier link was found
// bad.
func (t *chainWalk) walk(name string) int {
	here := len(t.path)
	if level, done := t.level[name]; done && level >= here {
		return here
	}
	t.level[name] = here
	for _, j := range t.chains[name] {
		if _, exists := t.chains[j.to]; !exists || j.planned && t.bad[j.rule] != "" {
			continue
		}
		back := here
		t.path = append(t.path, j)
		switch {
		case slices.ContainsFunc(t.path[:here], func(k link) bool { return k.to == j.to }):
			back = t.blame(fmt.Sprintf("it would close a loop of chains that leads back to %s", j.to))
		case t.deep && here > mostJumps:
			back = t.blame(fmt.Sprintf("more than %d jumps would follow one another, and the kernel takes no more", mostJumps))
		default:
			back = t.walk(j.to)
		}
		t.path = t.path[:here]
		if back < here {
			delete(t.level, name) // the walk did not reach its end
			return back
		}
	}
	return here
}

// blame finds the last planned link of the path bad, and returns how long the path is up to it.
// The replay leaves this rule out.
func (t *chainWalk) blame(reason string) int {
	for i := len(t.path) - 1; i > 0; i-- {
		if j := t.path[i]; j.planned {
			t.bad[j.rule] = reason
			return i
		}
	}
	return len(t.path) - 1 // every link is in force, so the kernel takes them
}
