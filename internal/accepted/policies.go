package accepted

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
)

// policyDrop is the policy that closes a chain.
const policyDrop = "DROP"

// Policies are the policies of the built-in chains of an iptables table, or of the base chains
// of a native table.
type Policies struct {
	Known map[string]string
	Drops []api.PolicyDrop // the chains whose policy has become DROP since
}

// Follow takes the policies (seen) of chains that a read showed, and returns the new policies
// of DROP. d has their table, the time, and the flush of that time. A chain that seen lacks is
// skipped.
func (p *Policies) Follow(chains []string, seen map[string]string, d api.PolicyDrop) (fresh []api.PolicyDrop) {
	known := maps.Clone(p.Known)
	if known == nil {
		known = map[string]string{}
	}
	p.Drops = slices.DeleteFunc(slices.Clone(p.Drops), func(d api.PolicyDrop) bool { return seen[d.Chain] != policyDrop })
	for _, chain := range chains {
		switch is, was := seen[chain], known[chain]; {
		case is == "": // the table is gone, or the chain
		case is != policyDrop || was == "" || was == policyDrop:
			known[chain] = is
		case !slices.ContainsFunc(p.Drops, func(d api.PolicyDrop) bool { return d.Chain == chain }):
			d.Chain, d.Was = chain, was
			p.Drops, fresh = append(p.Drops, d), append(fresh, d)
		}
	}
	p.Known = known
	return fresh
}

// Closings are the policies that have become DROP and are not logged yet.
type Closings struct {
	fresh []api.PolicyDrop
	At    time.Time // when they are logged; zero: there are none
}

// Add plans the log lines of policies: at At the loop calls Say.
func (c *Closings) Add(fresh []api.PolicyDrop) {
	if len(fresh) > 0 {
		c.fresh, c.At = append(c.fresh, fresh...), time.Now()
	}
}

// Say logs the policies that have become DROP, once. acceptIt is the command that accepts them.
func (c *Closings) Say(ctx context.Context, acceptIt string) {
	for _, p := range c.fresh {
		severity.Warnings(klog.FromContext(ctx)).Info("The policy of a chain has become DROP; canaryd leaves it, and the kernel drops packets that no rule accepts",
			"family", p.Family, "table", p.Table, "chain", p.Chain, "was", p.Was, "flush", p.Flush, "acceptIt", acceptIt)
	}
	c.fresh, c.At = nil, time.Time{}
}

// Dismiss accepts the policies that have become DROP (canaryd dismiss), and returns their
// chains' names. They are not reported again.
func (p *Policies) Dismiss() (chains []string) {
	for _, d := range p.Drops {
		chains = append(chains, d.String())
		p.Known[d.Chain] = policyDrop
	}
	p.Drops = nil
	return chains
}
