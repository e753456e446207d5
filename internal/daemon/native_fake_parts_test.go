package daemon

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
)

// Attributes that golang.org/x/sys lacks.
const (
	listElem      = 1 // NFTA_LIST_ELEM
	exprName      = 1 // NFTA_EXPR_NAME
	exprData      = 2 // NFTA_EXPR_DATA
	immediateData = 2 // NFTA_IMMEDIATE_DATA
	lookupSet     = 1 // NFTA_LOOKUP_SET
)

func nested(kind uint16, list []byte) []byte {
	return nft.AppendAttr(nil, kind|unix.NLA_F_NESTED, list, 0)
}

// verdict returns the data of a jump to a chain.
func verdict(to string) []byte {
	code := nft.AppendAttr(nil, unix.NFTA_VERDICT_CODE, binary.BigEndian.AppendUint32(nil, uint32(0xfffffffd)), 0)
	return nested(unix.NFTA_DATA_VERDICT, nft.AppendAttr(code, unix.NFTA_VERDICT_CHAIN, to, 1))
}

// expressing returns a rule of that text with one expression.
func expressing(text, name string, data []byte) native.Rule {
	list := nested(listElem, slices.Concat(nft.AppendAttr(nil, exprName, name, 1), nested(exprData, data)))
	return native.Rule{Attrs: slices.Concat(ruleOf(text).Attrs, nested(unix.NFTA_RULE_EXPRESSIONS, list))}
}

// jumpTo returns a rule that jumps to a chain, and lookUp a rule that looks an address up in a set.
func jumpTo(chain string) native.Rule {
	return expressing("jump "+chain, "immediate", nested(immediateData, verdict(chain)))
}

func lookUp(set string) native.Rule {
	return expressing("vmap @"+set, "lookup", nft.AppendAttr(nil, lookupSet, set, 1))
}

// elementOf returns an element with that key that leads to a chain.
func elementOf(key uint32, chain string) native.Element {
	value := nft.AppendAttr(nil, unix.NFTA_DATA_VALUE, binary.BigEndian.AppendUint32(nil, key), 0)
	return slices.Concat(nested(unix.NFTA_SET_ELEM_KEY, value), nested(unix.NFTA_SET_ELEM_DATA, verdict(chain)))
}

// elementKey returns the key of an element, and targetOf the chain to which it leads.
func elementKey(e native.Element) string {
	return string(nft.AttrPath(e, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE))
}

func targetOf(e native.Element) string {
	return nft.String(nft.AttrPath(e, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN))
}

// chainOf returns the chain to which a rule leads, and setOf the set in which it looks; "": none.
func chainOf(r native.Rule) string {
	return nft.String(nft.AttrPath(r.Attrs, unix.NFTA_RULE_EXPRESSIONS, listElem, exprData, immediateData, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN))
}

func setOf(r native.Rule) string {
	if nft.String(nft.AttrPath(r.Attrs, unix.NFTA_RULE_EXPRESSIONS, listElem, exprName)) != "lookup" {
		return ""
	}
	return nft.String(nft.AttrPath(r.Attrs, unix.NFTA_RULE_EXPRESSIONS, listElem, exprData, lookupSet))
}

// targetsIn returns the chains to which rules and elements of a table lead.
func targetsIn(t *native.Table) map[string]bool {
	led := map[string]bool{}
	for _, c := range t.Chains {
		for _, r := range c.Rules {
			led[chainOf(r)] = true
		}
	}
	for _, s := range t.Sets {
		for _, e := range s.Elements {
			led[targetOf(e)] = true
		}
	}
	return led
}

// A filling makes the table that a refill or a merge leaves, as pkg/native writes it.
type filling struct {
	want, next     *native.Table
	chains, filled map[string]bool
}

// refilled returns the table that a refill or a merge leaves.
func refilled(r native.Repair) *native.Table {
	next := *r.Now
	next.Chains, next.Sets = slices.Clone(next.Chains), slices.Clone(next.Sets)
	f := filling{r.Written(), &next, map[string]bool{}, map[string]bool{}}
	led := targetsIn(r.Now)
	ruleless := !slices.ContainsFunc(r.Now.Chains, func(c native.Chain) bool { return len(c.Rules) > 0 })
	for _, c := range f.want.Chains {
		now := r.Now.Chain(c.Name)
		if len(c.Rules) > 0 && (now == nil || len(now.Rules) == 0) && (c.Base || now != nil && (ruleless || led[c.Name])) {
			f.chain(c.Name)
		}
	}
	for _, s := range f.want.Sets {
		if f.set(s.Name) != nil {
			f.fill(s.Name)
		}
		if now := f.set(s.Name); r.Remedy == native.ByMerge && now != nil && len(now.Elements) > 0 && 2*len(now.Elements) <= len(s.Elements) {
			f.merge(s, now)
		}
	}
	return &next
}

func (f *filling) set(name string) *native.Set {
	i := slices.IndexFunc(f.next.Sets, func(s native.Set) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return &f.next.Sets[i]
}

// chain writes a chain that has no rules, and all that its rules name.
func (f *filling) chain(name string) {
	c, now := f.want.Chain(name), f.next.Chain(name)
	if c == nil || f.chains[name] || now != nil && len(now.Rules) > 0 {
		return
	}
	f.chains[name] = true
	if now == nil {
		f.next.Chains = append(f.next.Chains, *c)
	} else {
		now.Rules = c.Rules
	}
	for _, r := range c.Rules {
		f.fill(setOf(r))
		f.chain(chainOf(r))
	}
}

// fill writes the elements of a set that is gone or empty.
func (f *filling) fill(name string) {
	i := slices.IndexFunc(f.want.Sets, func(s native.Set) bool { return s.Name == name })
	if i < 0 || f.filled[name] {
		return
	}
	was, now := f.want.Sets[i], f.set(name)
	switch {
	case now == nil:
		f.next.Sets = append(f.next.Sets, was)
	case len(now.Elements) == 0:
		now.Elements = was.Elements
	default:
		return
	}
	f.filled[name] = true
	for _, e := range was.Elements {
		f.chain(targetOf(e))
	}
}

// merge adds the elements whose keys a set lacks.
func (f *filling) merge(was native.Set, now *native.Set) {
	elements := slices.Clone(now.Elements)
	for _, e := range was.Elements {
		if !slices.ContainsFunc(now.Elements, func(n native.Element) bool { return elementKey(n) == elementKey(e) }) {
			elements = append(elements, e)
			f.chain(targetOf(e))
		}
	}
	f.set(was.Name).Elements = elements
}
