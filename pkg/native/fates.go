package native

import (
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A fate is an effect that a rule may have on matching packets. A rule without one only counts.
type fate uint8

const (
	fateLets   fate = 1 << iota // it accepts or translates them
	fateKeeps                   // it drops or rejects them
	fateSteers                  // anything else, such as a mark, or a return
)

// looking lists the expressions that neither decide about a packet nor change it. Some have a
// form that does both: see writing and fateFinder.rule.
var looking = []string{"payload", "meta", "ct", "cmp", "range", "bitwise", "byteorder", "lookup", "immediate", "exthdr", "fib", "socket", "osf",
	"rt", "numgen", "hash", "xfrm", "tunnel", "inner", "connlimit", "limit", "quota", "counter", "last", "log", "match", "objref", "flow_offload"}

// writing has the attribute with which some of them write to the packet: the source register.
var writing = map[string]uint16{"payload": unix.NFTA_PAYLOAD_SREG, "meta": unix.NFTA_META_SREG, "ct": unix.NFTA_CT_SREG, "exthdr": unix.NFTA_EXTHDR_SREG}

// A fateFinder finds the fates of rules, including the fates of the chains to which they lead.
type fateFinder struct {
	*holder
	chains map[int]fate
	// lost has the fates that packets miss in a chain, because rules are left out.
	lost map[int]fate
}

// rule returns a rule's fates, and the chains to which it leads, by their index in the table.
// list has its expressions. of includes the fates of those chains. lacks decides by it whether
// a rule must wait.
func (f *fateFinder) rule(list []byte) (of fate, to []int) {
	verdict := func(data []byte) {
		switch v := verdictIn(data); {
		case v.chain != "":
			if i, ok := f.holder.chains[v.chain]; ok {
				of |= f.chain(i)
				to = append(to, i)
			}
		case v.code == 0: // NF_DROP
			of |= fateKeeps
		case v.code == 1: // NF_ACCEPT
			of |= fateLets
		case v.code != unix.NFT_CONTINUE && v.code != unix.NFT_BREAK:
			of |= fateSteers
		}
	}
	_, _ = mapExpressions(list, func(name string, data []byte) ([]byte, error) {
		sreg, may := writing[name]
		switch {
		case name == "reject":
			of |= fateKeeps
		case name == "nat", name == "masq", name == "redir", name == "tproxy":
			of |= fateLets
		case !slices.Contains(looking, name), may && has(data, sreg), name == "objref" && f.steers(data):
			of |= fateSteers
		case name == "immediate" && has(attrOf(data, immediateData), unix.NFTA_DATA_VERDICT):
			verdict(attrOf(data, immediateData))
		case name == "lookup":
			if i, ok := f.sets[nft.String(attrOf(data, unix.NFTA_LOOKUP_SET))]; ok {
				for _, e := range f.t.Sets[i].Elements {
					if data := attrOf(e, unix.NFTA_SET_ELEM_DATA); has(data, unix.NFTA_DATA_VERDICT) {
						verdict(data)
					}
				}
			}
		}
		return nil, nil
	})
	return of, to
}

// steers reports whether a rule that names an object does more with a packet than count it,
// match it or have its connection tracked. data has the attributes of the rule's objref.
func (f *fateFinder) steers(data []byte) bool {
	kind := number(data, unix.NFTA_OBJREF_IMM_TYPE)
	if i, ok := f.sets[nft.String(attrOf(data, unix.NFTA_OBJREF_SET_NAME))]; ok {
		kind = number(f.t.Sets[i].Attrs, unix.NFTA_SET_OBJ_TYPE)
	}
	switch kind {
	case unix.NFT_OBJECT_COUNTER, unix.NFT_OBJECT_QUOTA, unix.NFT_OBJECT_LIMIT, unix.NFT_OBJECT_CONNLIMIT,
		unix.NFT_OBJECT_CT_HELPER, unix.NFT_OBJECT_CT_TIMEOUT, unix.NFT_OBJECT_CT_EXPECT:
		return false
	}
	return true
}

// chain returns the fates of all rules of the chain at index i, for a rule that leads there. It
// computes them once.
func (f *fateFinder) chain(i int) fate {
	if of, known := f.chains[i]; known {
		return of
	}
	f.chains[i] = 0 // the kernel accepts no loop
	var all fate
	for _, r := range f.t.Chains[i].Rules {
		of, _ := f.rule(r.expressions())
		all |= of
	}
	f.chains[i] = all
	return all
}

// holdBehind leaves out the rules that wait. A packet that reaches a missing rule continues to
// rules that it would not reach in the whole table. Examples are a masquerade behind a missing
// return, and an accept behind a missing drop. So no rule is written behind a missing rule that
// decides, except:
//
//   - A rule that only drops lets nothing in, and a rule that only counts changes nothing.
//   - Behind a missing accept another accept lets in only packets that the whole table lets in.
//     But if the table translates, an accept keeps packets from translation.
//   - A chain that lacks a rule counts as missing itself where a rule leads there, unless all
//     missing rules accept or translate.
func (h *holder) holdBehind() {
	if len(h.held) == 0 {
		return
	}
	f := &fateFinder{h, map[int]fate{}, map[int]fate{}}
	for i := range h.t.Chains {
		if !h.t.Chains[i].Bound {
			f.lacks(i)
		}
	}
}

// lacks leaves out the rules of the chain at index i that wait, and returns the fates that
// packets miss there. holdBehind calls it for each chain, and lacks itself for the chains to
// which a rule leads. Fates that are missing there are missing for the next rules too, except
// accepts.
func (f *fateFinder) lacks(i int) (lost fate) {
	if lost, known := f.lost[i]; known {
		return lost
	}
	f.lost[i] = 0
	var inside fate
	first := "" // the first missing rule that decides
	c := &f.t.Chains[i]
	for j, r := range c.Rules {
		here := f.owner(Spot{nft.Rules, i, j})
		_, held := f.held[here]
		if !held && lost == 0 && !mayLead(r) {
			continue
		}
		of, to := f.rule(r.expressions())
		if !held && f.writes(here) && f.waits(of, lost) {
			f.put(here, hold{why: "waits behind " + first + ", which lacks a part", waits: true})
			held = true
		}
		if held {
			lost |= of
			inside |= of
		}
		for _, to := range to {
			if missing := f.lacks(to); missing&^fateLets != 0 {
				lost |= missing
				inside |= missing
			}
		}
		if lost != 0 && first == "" {
			first = strconv.Quote(f.words().rule(r, 0))
		}
	}
	f.lost[i] = inside
	return inside
}

// mayLead reports whether a rule may lead to chains: it names a chain or a set. lacks then
// examines it, although nothing before it is missing.
func mayLead(r Rule) (may bool) {
	names(r.expressions(), func(string) { may = true }, func(string) { may = true })
	return may
}

// waits reports whether holdBehind must leave out a rule: packets would meet it only because
// rules before it are missing. of has its fates, lost those of the missing rules. A plain table
// translates nothing: there an accept may follow missing accepts.
func (f *fateFinder) waits(of, lost fate) bool {
	switch {
	case lost == 0, of == 0, of == fateKeeps:
		return false
	}
	return !(f.plain && lost == fateLets && of&fateSteers == 0)
}
