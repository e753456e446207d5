package iptables

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A hookFit says how an nf_tables chain fits the built-in chain of the same name. Other programs
// than iptables declare such chains freely, usually an nftables.conf.
type hookFit uint8

const (
	// fits: it is as iptables makes it, or a user's chain.
	fits hookFit = iota
	// shifted: only its priority is different. Rules work there, but iptables neither prints nor
	// writes them. iptables 1.8.9 to 1.8.13 list it as empty and fail to write ("CHAIN_ADD
	// failed"); 1.8.7 writes, and cannot list.
	shifted
	// misfit: packets pass it elsewhere than iptables' chain.
	misfit
	// stranger: it has a hook, but no built-in chain's name. iptables leaves it out ("contains
	// incompatible base-chains").
	stranger
)

// fitOf returns how a chain fits its name, which decides whether canaryd shows and writes its
// rules. base is nil if it has no hook.
func fitOf(p Place, base *nft.Chain) hookFit {
	builtin := rules.Builtin(p.Table, p.Chain)
	switch {
	case base == nil && builtin:
		return misfit
	case base == nil:
		return fits
	case !builtin:
		return stranger
	}
	want := baseChainOf(p.Table, p.Chain)
	switch {
	case base.Hook != want.hook || (base.Kind == "nat") != (want.kind == "nat"):
		return misfit
	case base.Kind != want.kind || base.Priority != want.priority:
		return shifted
	default:
		return fits
	}
}

// misfitError returns an error with the reason why a misfit must get no rules, and a remedy. It
// is in Snapshot.Misfits, or refuses a script. base is nil if the chain has no hook.
func misfitError(f rules.Family, p Place, base *nft.Chain) error {
	want := baseChainOf(p.Table, p.Chain)
	is := "has no hook, so that no packet meets its rules"
	if base != nil {
		is = fmt.Sprintf("is of type %s at the hook %s", base.Kind, hookName(base.Hook))
	}
	return fmt.Errorf("chain %s of table %s %s %s, and iptables' is of type %s at the hook %s: canaryd writes nothing into it; "+
		"delete it (nft delete chain %s %s %s) and correct the file that declares it, such as /etc/nftables.conf",
		p.Chain, f.NFT(), p.Table, is, want.kind, hookName(want.hook), f.NFT(), p.Table, p.Chain)
}

// dormantError returns an error with the reason why no rule of a table is in force, and a
// remedy.
func dormantError(f rules.Family, table rules.TableName) error {
	return fmt.Errorf("table %s %s is dormant, so that no packet meets its rules: canaryd writes nothing into it; wake it (nft add table %s %s)",
		f.NFT(), table, f.NFT(), table)
}

// hookName returns nft's name for one of the five hooks, for misfitError.
func hookName(hook uint32) string {
	if int(hook) < len(hookChains) {
		return strings.ToLower(hookChains[hook])
	}
	return fmt.Sprintf("number %d", hook)
}

// builtinChain queries the kernel for a chain with a built-in chain's name, for exists. ok is
// false if it does not exist. A misfit is an error, because packets would not meet the rules.
func (p *tablePlan) builtinChain(chain string) (ok bool, err error) {
	c, ok, err := p.conn.Chain(p.family, p.table, chain)
	if err != nil || !ok {
		return false, err
	}
	place, base := Place{Table: p.table, Chain: chain}, baseOf(&c)
	if fitOf(place, base) == misfit {
		return false, misfitError(p.family, place, base)
	}
	return true, nil
}

// baseOf returns the chain if it has a hook, else nil, as fitOf needs it.
func baseOf(c *nft.Chain) *nft.Chain {
	if c.Base {
		return c
	}
	return nil
}

// textual returns the scripts before the first that iptables-restore must not write; writeRest
// calls it. That script writes into a built-in chain that does not fit, or whose rules iptables
// does not print. Such a text could not be read back. refused has the reason; nil if all may be
// written.
func (k *Kernel) textual(family rules.Family, scripts []Script) (may []Script, refused error) {
	reader, ok := k.reader.(nftReader)
	if !ok {
		return scripts, nil
	}
	for i := range scripts {
		for _, name := range scripts[i].builtinChains() {
			place := Place{Table: scripts[i].Table, Chain: name}
			c, exists, err := reader.conn.Chain(family, place.Table, place.Chain)
			if err != nil {
				return scripts[:i], err
			}
			var why error
			switch base := baseOf(&c); {
			case !exists:
			case fitOf(place, base) == misfit:
				why = misfitError(family, place, base)
			case fitOf(place, base) == shifted:
				why = shiftedError(family, place, base)
			}
			if why != nil {
				return scripts[:i], &RestoreError{Reason: ReasonIncompatible, Program: filepath.Base(k.tools[family].restore), Stderr: why.Error()}
			}
		}
	}
	return scripts, nil
}

// shiftedError returns an error with the reason why a shifted chain takes no text, and a
// remedy. textual refuses a script with it. base is the chain, which has a hook.
func shiftedError(f rules.Family, p Place, base *nft.Chain) error {
	want := baseChainOf(p.Table, p.Chain)
	return fmt.Errorf("chain %s of table %s %s is of type %s with priority %d, and iptables' is of type %s with priority %d: "+
		"canaryd can write only rules there that it has read as bytes, and not all of these were; "+
		"delete the chain (nft delete chain %s %s %s) and correct the file that declares it, such as /etc/nftables.conf",
		p.Chain, f.NFT(), p.Table, base.Kind, base.Priority, want.kind, want.priority, f.NFT(), p.Table, p.Chain)
}

// builtinChains returns the built-in chains that the script's steps name, each once. textual
// checks whether they fit.
func (s *Script) builtinChains() []string {
	var names []string
	seen := map[string]bool{}
	for i := range s.Steps {
		name := s.Steps[i].Chain
		if (i > 0 && s.Steps[i-1].Chain == name) || seen[name] || !rules.Builtin(s.Table, name) {
			continue
		}
		seen[name] = true
		names = append(names, name)
	}
	return names
}

// noteMisfits adds to all, a Snapshot's Misfits, the built-in chains of a table that must get
// no rules, each with the reason.
func (f *familyText) noteMisfits(table rules.TableName, all map[Place]error) {
	for _, chain := range rules.BuiltinChains(table) {
		p := Place{Table: table, Chain: chain}
		switch c := f.raw.Chain(p); {
		case f.raw.Dormant(table):
			all[p] = dormantError(f.family, table)
		case c != nil && f.fit(p, c) == misfit:
			all[p] = misfitError(f.family, p, c.Base)
		}
	}
}
