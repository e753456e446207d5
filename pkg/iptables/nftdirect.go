package iptables

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A directWriter turns scripts into one netlink batch. For this it reads from the kernel which
// chains exist, and the rules of a chain that is to lose one. These reads need no guard: the
// kernel accepts the batch only while nothing was committed since the read that the batch names.
//
// It writes the final state of each table, and does not repeat the script's commands. The batch
// creates chains, deletes rules, adds rules, and deletes chains, in this order. So each rule
// that remains keeps its handle. A new rule is placed before the next remaining rule, or at the
// end. No message refers to a rule of the batch itself.
type directWriter struct {
	conn   *nft.Conn
	source lexicons
	taught taught // bytes that are right while the chains of texts exist
	sets   *usedNumbers
	batch  *nft.Batch
	writes bool // the batch has content
	// written are the chains that the batch touches, and added counts the new rules.
	written []nft.Rewrite
	added   int
	// sought is a message's number, and found is the new rule that this message writes.
	sought int
	found  *RefusedRule
}

// errNotDirect: the text path has to decide about a script.
var errNotDirect = errors.New("cannot be written directly")

// add adds a script to the batch; encodeSeeking calls it. After an error the batch is as
// before, and iptables-restore gets the script. The script has a rule without a known raw form.
// Or it would fail in iptables-restore, too, which then returns the reason.
func (w *directWriter) add(family rules.Family, script *Script) error {
	if script.Empty() {
		return nil
	}
	before := w.batch.Mark()
	plan := tablePlan{directWriter: w, family: family, table: script.Table, chains: map[string]*chainPlan{}, exist: map[string]bool{}}
	err := plan.simulate(script)
	if err == nil {
		err = plan.write()
	}
	if err != nil {
		w.batch.Cut(before)
		return fmt.Errorf("%s %s %w: %w", family, script.Table, errNotDirect, err)
	}
	w.writes = true
	for _, c := range plan.order {
		w.written = append(w.written, nft.Rewrite{Family: family, Place: Place{Table: script.Table, Chain: c.name}})
	}
	w.added += newRules(plan.order)
	return nil
}

// A tablePlan is the effect of a script on one table.
type tablePlan struct {
	*directWriter
	family rules.Family
	table  rules.TableName
	chains map[string]*chainPlan
	order  []*chainPlan // as the script names them
	asked  sync.Mutex
	exist  map[string]bool // the kernel's answers about chains; asked guards it
}

// A chainPlan is the effect of a script on one chain.
type chainPlan struct {
	name    string
	create  bool     // have the kernel create it, if it does not exist
	empty   bool     // delete all existing rules
	drop    bool     // delete the chain
	loaded  bool     // rules begins with all remaining rules
	rules   []slot   // remaining and new rules, in order
	removed []uint64 // handles of deleted rules
}

// A slot is one rule of a chain.
type slot struct {
	handle uint64      // 0 if it is new
	raw    *nft.Rule   // of an existing one
	rule   *rules.Rule // of a new one, in its script
}

func (s slot) isNew() bool { return s.handle == 0 }

// chain returns the plan of a chain that a Step names; simulate calls it. verb is the Step's:
// only a built-in chain that is to get a rule may be missing, and is created. After an error,
// iptables-restore gets the whole script.
func (p *tablePlan) chain(name string, verb Verb) (*chainPlan, error) {
	if n := len(p.order); n > 0 && p.order[n-1].name == name {
		return p.order[n-1], nil // rules are grouped by chain
	}
	if c := p.chains[name]; c != nil {
		return c, nil
	}
	exists, err := p.exists(name)
	if err != nil {
		return nil, err
	}
	if !exists && (!rules.Builtin(p.table, name) || verb != Append && verb != Insert) {
		return nil, fmt.Errorf("chain %s does not exist", name)
	}
	return p.plan(&chainPlan{name: name, create: !exists, loaded: !exists}), nil
}

// plan notes and returns a new chain's plan, for chain and simulate.
func (p *tablePlan) plan(c *chainPlan) *chainPlan {
	p.chains[c.name] = c
	p.order = append(p.order, c)
	return c
}

// exists queries the kernel, once, whether a chain exists: a chain of a Step, or the target of
// a new rule. Several goroutines call it. A built-in chain that is a misfit is an error.
func (p *tablePlan) exists(chain string) (bool, error) {
	p.asked.Lock()
	defer p.asked.Unlock()
	if known, asked := p.exist[chain]; asked {
		return known, nil
	}
	ask := p.builtinChain
	if !rules.Builtin(p.table, chain) {
		ask = func(name string) (bool, error) { return p.conn.HasChain(p.family, p.table, name) }
	}
	exists, err := ask(chain)
	p.exist[chain] = exists
	return exists, err
}

// simulate applies the script's steps to the plan, which write then encodes; add calls it.
// After an error, iptables-restore gets the whole script.
func (p *tablePlan) simulate(script *Script) error {
	for _, name := range script.Declare {
		if rules.Builtin(p.table, name) {
			return fmt.Errorf("built-in chain %s is declared", name)
		}
		if p.chains[name] == nil {
			p.plan(&chainPlan{name: name, create: true, empty: true, loaded: true})
		}
	}
	for i := range script.Steps {
		step := &script.Steps[i]
		c, err := p.chain(step.Chain, step.Verb)
		if err == nil {
			err = p.step(c, step)
		}
		if err != nil {
			return fmt.Errorf("-%c %s: %w", step.Verb, step.Chain, err)
		}
	}
	return nil
}

// step applies one step of a script to the plan of its chain; simulate calls it. Insert and
// Delete need the chain's rules, which load reads. After an error, iptables-restore gets the
// whole script, and returns the reason if it fails, too.
func (p *tablePlan) step(c *chainPlan, step *Step) error {
	if c.drop {
		return errors.New("the chain was deleted before")
	}
	if step.Verb == Insert || step.Verb == Delete {
		if err := p.load(c); err != nil {
			return err
		}
	}
	switch step.Verb {
	case Append:
		c.rules = append(c.rules, slot{rule: &step.Rule})
	case Insert:
		at := max(step.Index, 1) - 1
		if at > len(c.rules) {
			return fmt.Errorf("no place %d among %d rules", step.Index, len(c.rules))
		}
		c.rules = append(c.rules, slot{}) // slices.Insert takes 2 KB in the program
		copy(c.rules[at+1:], c.rules[at:])
		c.rules[at] = slot{rule: &step.Rule}
	case Delete:
		return p.remove(c, step)
	case Flush:
		if slices.ContainsFunc(c.rules, slot.isNew) {
			return errTakenBack
		}
		c.empty = c.empty || !c.create
		c.loaded, c.rules, c.removed = true, nil, nil
	case Drop:
		if rules.Builtin(p.table, c.name) || len(c.rules) > 0 {
			return errors.New("the chain is built in or not empty")
		}
		c.drop = true
	default:
		return errors.New("not a command")
	}
	return nil
}

// load reads the existing rules of a chain, once, in front of the rules that the script has
// appended. Insert and Delete need their places and handles; step calls it.
func (p *tablePlan) load(c *chainPlan) error {
	if c.loaded {
		return nil
	}
	var standing []slot
	err := p.conn.EachRule(p.family, p.table, c.name, func(m nft.RuleMessage) error {
		raw, _ := nameSets(m.Rule.Clone(), p.sets.index.name) // the names identify the rule
		standing = append(standing, slot{handle: m.Handle, raw: &raw})
		return nil
	})
	c.rules, c.loaded = append(standing, c.rules...), true
	return err
}

// remove applies a Delete; step calls it. A rule that is not found may exist in another form
// with the same meaning: iptables has to look, after this error.
func (p *tablePlan) remove(c *chainPlan, step *Step) error {
	at := step.Index - 1
	if step.Index == 0 {
		want, ok := p.raw(step.Rule, nil)
		if !ok {
			return errUnknownRule
		}
		at = slices.IndexFunc(c.rules, func(s slot) bool {
			if s.isNew() {
				added, ok := p.raw(*s.rule, nil)
				return ok && added.Equal(want)
			}
			return s.raw.Equal(want)
		})
	}
	if at < 0 || at >= len(c.rules) {
		return errors.New("no such rule")
	}
	if c.rules[at].isNew() {
		return errTakenBack
	}
	c.removed = append(c.removed, c.rules[at].handle)
	c.rules = slices.Delete(c.rules, at, at+1)
	return nil
}

// raw returns the rule as the kernel would store it, and whether that is known; remove and
// writeRule call it. Texts that teach has tried count first. It may use room, which is
// overwritten.
func (p *tablePlan) raw(rule rules.Rule, room []byte) (nft.Rule, bool) {
	if t, ok := p.taught[p.family.Table(p.table)][rule.Key()]; ok {
		return t.raw, true
	}
	return p.source.raw(p.family, rule, room)
}

var (
	errUnknownRule = errors.New("a rule whose raw form is not known")
	// errTakenBack: the kernel would never get the rule, and so could not refuse it.
	errTakenBack = errors.New("a rule is taken back that the same script adds")
)

// write adds the plan's messages to the batch; add calls it after simulate. It also finds the
// rule of a sought message (see named). After an error, iptables-restore gets the whole script.
func (p *tablePlan) write() error {
	p.message(p.batch, unix.NFT_MSG_NEWTABLE, netlink.Create, unix.NFTA_TABLE_NAME)
	p.batch.End()
	for _, c := range p.order {
		if c.create {
			p.writeChain(c)
		}
	}
	for _, c := range p.order {
		p.writeDeletions(c)
	}
	before := p.batch.Messages()
	if err := p.writeNewRules(); err != nil {
		return err
	}
	if p.sought > before {
		p.seek(p.sought - before)
	}
	for _, c := range p.order {
		if c.drop {
			// Without NONREC the kernel would delete the chain's rules, too.
			p.message(p.batch, unix.NFT_MSG_DELCHAIN, unix.NLM_F_NONREC, unix.NFTA_CHAIN_TABLE)
			p.batch.Text(unix.NFTA_CHAIN_NAME, c.name)
			p.batch.End()
		}
	}
	return nil
}

// message begins a message that names the table.
func (p *tablePlan) message(b *nft.Batch, kind uint16, flags netlink.HeaderFlags, attr uint16) {
	b.Begin(kind, flags, p.family)
	b.Text(attr, p.table)
}

// writeChain creates a chain for write; a built-in one with iptables' hook and policy ACCEPT.
// An existing user's chain stays unchanged (there is no NLM_F_EXCL).
func (p *tablePlan) writeChain(c *chainPlan) {
	p.message(p.batch, unix.NFT_MSG_NEWCHAIN, netlink.Create, unix.NFTA_CHAIN_TABLE)
	p.batch.Text(unix.NFTA_CHAIN_NAME, c.name)
	if rules.Builtin(p.table, c.name) {
		base := baseChainOf(p.table, c.name)
		p.batch.Pair(unix.NFTA_CHAIN_HOOK, base.hook, uint32(base.priority))
		p.batch.Number(unix.NFTA_CHAIN_POLICY, nfAccept)
		p.batch.Text(unix.NFTA_CHAIN_TYPE, base.kind)
	}
	p.batch.End()
}

// writeDeletions adds the messages that delete rules of a chain: all existing rules, or
// single ones by their handles. write calls it before any new rule is added.
func (p *tablePlan) writeDeletions(c *chainPlan) {
	if c.empty { // without a handle it means all rules of the chain
		p.message(p.batch, unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_TABLE)
		p.batch.Text(unix.NFTA_RULE_CHAIN, c.name)
		p.batch.End()
	}
	for _, handle := range c.removed {
		p.message(p.batch, unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_TABLE)
		p.batch.Text(unix.NFTA_RULE_CHAIN, c.name)
		p.batch.Number64(unix.NFTA_RULE_HANDLE, handle)
		p.batch.End()
	}
}

// nfAccept is NF_ACCEPT in linux/netfilter.h.
const nfAccept = 1

// A baseChain has the kernel's attributes of a built-in chain.
type baseChain struct {
	kind     string // NFTA_CHAIN_TYPE
	hook     uint32 // NF_INET_* in linux/netfilter.h
	priority int32  // NF_IP_PRI_* in linux/netfilter_ipv4.h; IPv6's are the same
}

// hookChains are the built-in chains of the hooks, in the order of their numbers.
var hookChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// baseChainOf returns the attributes with which iptables-nft creates a built-in chain
// (xtables_ipv4 in iptables/nft.c, 1.8.9). canaryd creates chains with them, and fitOf compares
// existing chains with them.
func baseChainOf(table rules.TableName, chain string) baseChain {
	base := baseChain{kind: "filter"}
	base.hook = uint32(slices.Index(hookChains, chain))
	switch table {
	case rules.Raw:
		base.priority = -300
	case rules.Mangle:
		base.priority = -150
		if chain == "OUTPUT" { // a changed mark changes the route
			base.kind = "route"
		}
	case rules.Nat:
		base.kind, base.priority = "nat", -100 // destinations
		if chain == "INPUT" || chain == "POSTROUTING" {
			base.priority = 100 // sources
		}
	case rules.Security:
		base.priority = 150 // not NF_IP_PRI_SECURITY, which is 50
	}
	return base
}
