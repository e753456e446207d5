package iptables

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file encodes the new rules of a table, several chains in parallel. At 1,000 services one
// processor needs 25 ms for them, and clients wait for that.

// shareFrom is the number of new rules that is worth a goroutine. A goroutine starts in
// microseconds and has its own chunk of the batch.
const shareFrom = 1000

// writeNewRules adds the new rules of all chains to the batch, behind the deletions;
// tablePlan.write calls it. After an error, iptables-restore gets the whole script.
func (p *tablePlan) writeNewRules() error {
	shares := p.shares(runtime.GOMAXPROCS(0))
	if len(shares) == 1 {
		w := rulesWriter{plan: p, batch: p.batch}
		return w.write(shares[0])
	}
	writers, errs := make([]rulesWriter, len(shares)), make([]error, len(shares))
	count := uint32(0)
	var all sync.WaitGroup
	for i, chains := range shares {
		// Each rule is one message, and messages are numbered.
		writers[i] = rulesWriter{plan: p, batch: p.batch.Part(count)}
		count += uint32(newRules(chains))
		all.Go(func() { errs[i] = writers[i].write(chains) })
	}
	all.Wait()
	for i := range writers {
		if errs[i] != nil {
			return errs[i]
		}
		p.batch.Join(writers[i].batch)
	}
	return nil
}

// shares divides the chains into at most n shares with about as many new rules each, in their
// order. writeNewRules has a goroutine for each share.
func (p *tablePlan) shares(n int) [][]*chainPlan {
	total := newRules(p.order)
	n = max(1, min(n, total/shareFrom))
	var shares [][]*chainPlan
	first, count := 0, 0
	for i, c := range p.order {
		if count += newRules([]*chainPlan{c}); count >= total*(len(shares)+1)/n && len(shares) < n-1 {
			shares, first = append(shares, p.order[first:i+1]), i+1
		}
	}
	return append(shares, p.order[first:])
}

// newRules counts the new rules of chains, which are as many messages.
func newRules(chains []*chainPlan) int {
	n := 0
	for _, c := range chains {
		for i := range c.rules {
			if c.rules[i].isNew() {
				n++
			}
		}
	}
	return n
}

// A rulesWriter encodes new rules into a batch, which may be a part of another one.
type rulesWriter struct {
	plan  *tablePlan
	batch *nft.Batch
	room  []byte // for the rule that is being put together
}

// write encodes the new rules of a share of the chains. The error names the chain.
func (w *rulesWriter) write(chains []*chainPlan) error {
	for _, c := range chains {
		if err := w.writeRules(c); err != nil {
			return fmt.Errorf("chain %s: %w", c.name, err)
		}
	}
	return nil
}

// writeRules puts each new rule of a chain before the next remaining one, or at the end. The
// handle of the remaining rule gives the place.
func (w *rulesWriter) writeRules(c *chainPlan) error {
	first := 0 // the first new rule before the next remaining one
	for i, s := range c.rules {
		if s.isNew() {
			continue
		}
		for _, added := range c.rules[first:i] {
			if err := w.writeRule(c.name, *added.rule, s.handle); err != nil {
				return err
			}
		}
		first = i + 1
	}
	for _, added := range c.rules[first:] {
		if err := w.writeRule(c.name, *added.rule, 0); err != nil {
			return err
		}
	}
	return nil
}

// writeRule adds the message for one new rule: before the rule with handle next, or at the
// end of the chain for 0. After an error, iptables-restore gets the whole script. Then the
// rule's bytes are not known, or an ipset, chain or file that it names does not exist.
func (w *rulesWriter) writeRule(chain string, added rules.Rule, next uint64) error {
	p := w.plan
	rule, ok := p.raw(added, w.room)
	if !ok {
		return errUnknownRule
	}
	_, given := p.taught[p.family.Table(p.table)][added.Key()]
	if !given {
		w.room = rule.Expressions
	}
	need, err := needsOf(rule, p.family)
	if err != nil && !given {
		return err
	}
	if err := pinnedStand(rule); err != nil {
		return err
	}
	if rule, err = numberSets(rule, p.sets.number); err != nil {
		return err
	}
	if err := p.targetStands(need.jump); err != nil {
		return err
	}
	flags := netlink.Create
	if next == 0 {
		flags |= netlink.Append
	}
	p.message(w.batch, unix.NFT_MSG_NEWRULE, flags, unix.NFTA_RULE_TABLE)
	w.batch.Text(unix.NFTA_RULE_CHAIN, chain)
	if next != 0 {
		w.batch.Number64(unix.NFTA_RULE_POSITION, next)
	}
	w.batch.Blob(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, rule.Expressions)
	w.batch.Compat(need.compat)
	if len(rule.Userdata) > 0 {
		w.batch.Blob(unix.NFTA_RULE_USERDATA, rule.Userdata)
	}
	w.batch.End()
	return nil
}

// targetStands returns the reason why a rule cannot jump to a chain, or nil; nil is no chain.
// writeRule calls it, because the kernel would refuse the whole batch. Several goroutines call
// it.
func (p *tablePlan) targetStands(chain []byte) error {
	if chain == nil {
		return nil
	}
	c, planned := p.chains[string(chain)]
	if planned && !c.drop {
		return nil
	}
	exists := false
	if !planned {
		var err error
		if exists, err = p.exists(string(chain)); err != nil {
			return err
		}
	}
	if !exists {
		return fmt.Errorf("it jumps to chain %s, which does not exist", chain)
	}
	return nil
}
