package iptablestest

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The tools' messages about commands that fail.
const (
	sayNoChain   = "No chain/target/match by that name."
	sayNoRule    = "Bad rule (does a matching rule exist in that chain?)."
	sayExists    = "Chain already exists."
	sayBadPolicy = "Bad policy name."
	sayNotBase   = "Bad built-in chain name."
	sayInsertBig = "Index of insertion too big."
	sayDeleteBig = "Index of deletion too big."
	sayBusy      = "CHAIN_DEL failed (Device or resource busy): chain "
)

// A section applies the commands of one table to a copy of it.
type section struct {
	*run
	table   *rules.Table
	own     map[string]bool // chains with their own memory for rules
	end     int             // the line of COMMIT
	cleared bool            // the table's former content was deleted
	wrote   bool            // a command wrote something
	// iptables-nft sends everything to the kernel at COMMIT. So the kernel's refusals are
	// reported after all of the program's own.
	refused []string      // the reasons, a line each
	at      int           // the line of the first refusal
	undead  []rules.Chain // the chains that the kernel will refuse to delete
}

// clear does the first step of a restore without --noflush: nft deletes the table, legacy
// empties it and keeps its policies.
func (s *section) clear(existed bool) {
	kept := rules.NewTable(s.table.Name)
	if s.f.backend() == iptables.Legacy {
		for _, c := range s.table.Chains {
			if rules.Builtin(s.table.Name, c.Name) {
				c.Rules = nil
				kept.Add(c)
			}
		}
	}
	s.table, s.cleared = kept, existed
}

func (s *section) all(body []command) error {
	for _, c := range body {
		if err := s.command(c); err != nil {
			return err
		}
	}
	if len(s.refused) > 0 {
		return s.kernel(s.at, s.refused...)
	}
	return nil
}

// refuse notes, on nft, that the kernel will refuse a command. On legacy the program fails at
// once.
func (s *section) refuse(line int, why string) *iptables.RestoreError {
	if s.f.backend() == iptables.Legacy {
		return s.failed(line, "")
	}
	if s.at == 0 {
		s.at = line
	}
	s.refused = append(s.refused, fmt.Sprintf("line %d: %s", line, why))
	return nil
}

// command executes one line. It returns error so that a nil stays a nil.
func (s *section) command(c command) error {
	line, what, args := c.line, c.name, c.args
	var e *iptables.RestoreError
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	switch {
	case what == "-Z":
	case what == "-F" && name == "":
		for i := range s.table.Chains {
			s.flush(&s.table.Chains[i])
		}
	case what == "-X" && name == "":
		e = s.deleteAll(line)
	case len(args) == 0:
		e = s.badLine(line, fmt.Sprintf("option %q requires an argument", what))
	case what == ":" && len(args) > 1:
		e = s.declare(line, name, args[1])
	case what == "-N":
		e = s.newChain(line, name)
	case what == "-F":
		e = s.onChain(line, name, s.flush)
	case what == "-X":
		e = s.deleteChain(line, name)
	case what == "-P" && len(args) == 2:
		e = s.policy(line, name, args[1])
	case slices.Contains([]string{"-A", "-I", "-R", "-D", "-C"}, what):
		e = s.rule(c, what, name)
	default:
		e = s.badLine(line, fmt.Sprintf("unknown command %q", what))
	}
	if e != nil {
		return e
	}
	return nil
}

// chain returns a chain. It creates a missing built-in chain.
func (s *section) chain(name string) *rules.Chain {
	if c := s.table.Chain(name); c != nil || !rules.Builtin(s.table.Name, name) {
		return c
	}
	s.wrote = true
	return s.table.Add(rules.Chain{Name: name, Policy: "ACCEPT"})
}

// change copies a chain's rules before their first change.
func (s *section) change(c *rules.Chain) {
	if !s.own[c.Name] {
		c.Rules, s.own[c.Name] = slices.Clone(c.Rules), true
	}
}

func (s *section) onChain(line int, name string, do func(*rules.Chain)) *iptables.RestoreError {
	c := s.chain(name)
	if c == nil {
		return s.failed(line, sayNoChain)
	}
	do(c)
	return nil
}

func (s *section) flush(c *rules.Chain) {
	if len(c.Rules) > 0 {
		s.wrote = true
	}
	c.Rules = nil
}

// declare executes ":NAME POLICY".
func (s *section) declare(line int, name, policy string) *iptables.RestoreError {
	if !rules.Builtin(s.table.Name, name) {
		if policy != "-" && s.f.backend() == iptables.Legacy {
			return s.badDeclaration(line, name, policy, "Bad built-in chain name")
		}
		if c := s.table.Chain(name); c != nil {
			s.flush(c)
			return nil
		}
		return s.newChain(line, name)
	}
	c := s.chain(name)
	s.wrote = true
	if policy == "-" {
		return nil
	}
	if policy != "ACCEPT" && policy != "DROP" {
		return s.badDeclaration(line, name, policy, "Bad policy name")
	}
	c.Policy = policy
	return nil
}

// badDeclaration is the only failure whose reason legacy names.
func (s *section) badDeclaration(line int, name, policy, why string) *iptables.RestoreError {
	if s.f.backend() == iptables.NFT {
		return s.failed(line, why+".")
	}
	return s.refusal(1, fmt.Sprintf("%s Can't set policy `%s' on `%s' line %d: %s", s.versioned(), policy, name, line, why))
}

func (s *section) newChain(line int, name string) *iptables.RestoreError {
	if s.table.Chain(name) != nil || rules.Builtin(s.table.Name, name) {
		return s.failed(line, sayExists)
	}
	s.table.Add(rules.Chain{Name: name})
	s.wrote = true
	return nil
}

func (s *section) policy(line int, name, policy string) *iptables.RestoreError {
	switch {
	case s.table.Name == rules.Nat && policy == "DROP":
		return s.natDrop(line)
	case !rules.Builtin(s.table.Name, name):
		return s.failed(line, sayNotBase)
	case policy != "ACCEPT" && policy != "DROP":
		return s.failed(line, sayBadPolicy)
	}
	s.chain(name).Policy = policy
	s.wrote = true
	return nil
}

func (s *section) natDrop(line int) *iptables.RestoreError {
	return s.badLine(line, "\nThe \"nat\" table is not intended for filtering, the use of DROP is therefore inhibited.\n\n")
}

func (s *section) deleteChain(line int, name string) *iptables.RestoreError {
	c := s.table.Chain(name)
	switch {
	case c == nil || s.f.backend() == iptables.Legacy && rules.Builtin(s.table.Name, name):
		return s.failed(line, sayNoChain)
	case len(c.Rules) > 0 || s.referenced(name):
		if e := s.refuse(line, sayBusy+name); e != nil {
			return e
		}
		s.undead = append(s.undead, *c)
	}
	s.forget(name)
	s.wrote = true
	return nil
}

// deleteAll executes "-X": it deletes all user's chains, or none if one is in use. On nft it
// also deletes the empty built-in chains with the policy ACCEPT.
func (s *section) deleteAll(line int) *iptables.RestoreError {
	for _, c := range slices.Clone(s.table.Chains) {
		if rules.Builtin(s.table.Name, c.Name) {
			if s.f.backend() == iptables.NFT && len(c.Rules) == 0 && c.Policy == "ACCEPT" {
				s.forget(c.Name)
				s.wrote = true
			}
			continue
		}
		if e := s.deleteChain(line, c.Name); e != nil {
			return e
		}
	}
	return nil
}

// forget removes a chain from the table.
func (s *section) forget(name string) {
	left := rules.NewTable(s.table.Name)
	left.Grow(len(s.table.Chains))
	for _, c := range s.table.Chains {
		if c.Name != name {
			left.Add(c)
		}
	}
	s.table = left
}

func (s *section) referenced(name string) bool {
	for _, c := range slices.Concat(s.table.Chains, s.undead) {
		if slices.ContainsFunc(c.Rules, func(r rules.Rule) bool { return r.Target == name }) {
			return true
		}
	}
	return false
}

// rule executes -A, -I, -R, -D and -C.
func (s *section) rule(c command, what, name string) *iptables.RestoreError {
	line, at, rule := c.line, c.at, c.rule
	if c.refused != nil {
		return s.badLine(line, c.refused.Error())
	}
	if e := s.target(line, name, rule); e != nil {
		return e
	}
	if what == "-D" || what == "-C" {
		return s.find(line, what, name, at, rule)
	}
	if e := s.leans(line, name, rule); e != nil {
		return e
	}
	chain := s.chain(name)
	if chain == nil {
		return s.failed(line, sayNoChain)
	}
	s.wrote = true
	s.change(chain)
	switch {
	case what == "-A":
		at = len(chain.Rules) + 1
	case what == "-I" && at == 0:
		at = 1
	case what == "-R" && (at < 1 || at > len(chain.Rules)):
		return s.failed(line, "Index of replacement too big.")
	case what == "-R":
		chain.Rules[at-1] = rule
		return nil
	case at > len(chain.Rules)+1:
		return s.failed(line, sayInsertBig)
	}
	chain.Rules = slices.Insert(chain.Rules, at-1, rule)
	return nil
}

// leans refuses a rule that names a missing set or nfacct object.
func (s *section) leans(line int, chain string, r rules.Rule) *iptables.RestoreError {
	needs := r.Needs()
	if len(needs.Sets)+len(needs.Accounts) == 0 {
		return nil
	}
	switch set, account := s.f.sets.lacks(needs.Sets, needs.Accounts); {
	case set != "":
		return s.badLine(line, fmt.Sprintf("Set %s doesn't exist.\n", set))
	case account != "" && s.f.backend() == iptables.Legacy:
		return s.failed(s.end, "")
	case account != "":
		return s.refuse(line, "RULE_APPEND failed (No such file or directory): rule in chain "+chain)
	}
	return nil
}

// target refuses a rule whose target does not exist or is not allowed here.
func (s *section) target(line int, chain string, r rules.Rule) *iptables.RestoreError {
	switch {
	case r.Target == "DROP" && s.table.Name == rules.Nat:
		return s.natDrop(line)
	case rules.Builtin(s.table.Name, r.Target):
		return s.refuse(line, "RULE_APPEND failed (No such file or directory): rule in chain "+chain)
	case r.Target == "" || s.table.Chain(r.Target) != nil || isExtension(r.Target):
		return nil
	}
	return s.noTarget(line, s.end, r)
}

// find executes -D and -C.
func (s *section) find(line int, what, name string, at int, rule rules.Rule) *iptables.RestoreError {
	c := s.table.Chain(name)
	if c == nil {
		return s.failed(line, sayNoRule)
	}
	if at == 0 {
		at = slices.IndexFunc(c.Rules, rule.Equal) + 1
	} else if at > len(c.Rules) {
		return s.failed(line, sayDeleteBig)
	}
	if at == 0 {
		return s.failed(line, sayNoRule)
	}
	if what == "-D" {
		s.change(c)
		c.Rules = slices.Delete(c.Rules, at-1, at)
		s.wrote = true
	}
	return nil
}
