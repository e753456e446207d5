package standby

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// xt returns an expression of x_tables: a match or a target.
func xt(kind, name string, revision uint32, info ...byte) nft.Expression {
	data := nft.AppendAttr(nil, unix.NFTA_TARGET_NAME, name, 1)
	data = nft.AppendAttr(number(data, unix.NFTA_TARGET_REV, revision), unix.NFTA_TARGET_INFO, info, 0)
	return nft.Expression{Name: kind, Data: data}
}

// listOf returns a rule of these expressions.
func listOf(all ...nft.Expression) nft.Rule {
	var list []byte
	for _, e := range all {
		list = expression(list, e.Name, e.Data)
	}
	return nft.Rule{Expressions: list}
}

// leadsTo returns a jump or goto.
func leadsTo(code int32, chain string) nft.Expression {
	v := nft.AppendAttr(number(nil, unix.NFTA_VERDICT_CODE, uint32(code)), unix.NFTA_VERDICT_CHAIN, chain, 1)
	data := number(nil, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
	return nft.Expression{Name: "immediate", Data: nft.AppendAttr(data, unix.NFTA_IMMEDIATE_DATA|unix.NLA_F_NESTED, nft.AppendAttr(nil, unix.NFTA_DATA_VERDICT|unix.NLA_F_NESTED, v, 0), 0)}
}

func jump(chain string) nft.Expression { return leadsTo(unix.NFT_JUMP, chain) }

// verdictOf returns an expression with a verdict.
func verdictOf(code int32) nft.Expression {
	var e nft.Expression
	_ = nft.Rule{Expressions: verdict(nil, uint32(code))}.Each(func(of nft.Expression) error {
		e = of
		return nil
	})
	return e
}

// range1 returns struct nf_nat_ipv4_multi_range_compat with that number of ranges.
func range1(ranges, flags uint32) []byte {
	b := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, ranges), flags)
	return append(b, 10, 0, 0, 1, 10, 0, 0, 1, 0, 80, 0, 80, 0, 0, 0, 0)
}

// range2 returns struct nf_nat_range2.
func range2(flags uint32) []byte {
	b := binary.NativeEndian.AppendUint32(nil, flags)
	return append(b, make([]byte, 44)...)
}

// TestWhatIsCopied: each kind of rule must have its effect in the copy, or an error that leaves out
// its chain.
func TestWhatIsCopied(t *testing.T) {
	const v4, v6 = tableid.IPv4, tableid.IPv6
	meta := func(key, register uint16, value uint32) nft.Expression {
		return nft.Expression{Name: "meta", Data: number(number(nil, unix.NFTA_META_KEY, uint32(key)), register, value)}
	}
	mark := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 0x4000), 0xffffffff)
	bits := nft.Expression{Name: "bitwise", Data: value(nil, unix.NFTA_BITWISE_XOR, binary.NativeEndian.AppendUint32(nil, 0x2000))}
	setMark := meta(unix.NFT_META_MARK, unix.NFTA_META_SREG, 1)
	for _, test := range []struct {
		name   string
		family tableid.Family
		list   []nft.Expression
		want   effect
		marks  uint32
		bad    string // a part of the error
	}{
		{"a counter", v4, []nft.Expression{{Name: "counter"}}, nothing, 0, ""},
		{"a comment", v4, []nft.Expression{xt("match", "comment", 0, 'x')}, nothing, 0, ""},
		{"LOG behind matches", v4, []nft.Expression{xt("match", "tcp", 0), xt("target", "LOG", 0)}, nothing, 0, ""},
		{"NFLOG", v6, []nft.Expression{xt("target", "NFLOG", 0)}, nothing, 0, ""},
		{"nft's log", v6, []nft.Expression{{Name: "log"}}, nothing, 0, ""},
		{"a list of clients", v4, []nft.Expression{xt("match", "recent", 1)}, changes, 0, ""},
		{"accept", v4, []nft.Expression{verdictOf(nfAccept)}, ends, 0, ""},
		{"drop", v4, []nft.Expression{verdictOf(nfDrop)}, ends, 0, ""},
		{"return", v4, []nft.Expression{verdictOf(unix.NFT_RETURN)}, ends, 0, ""},
		{"goto", v4, []nft.Expression{leadsTo(unix.NFT_GOTO, "X")}, leads, 0, ""},
		{"MARK", v4, []nft.Expression{xt("target", "MARK", 2, mark...)}, changes, 0x4000, ""},
		{"MARK as nf_tables' own", v4, []nft.Expression{meta(unix.NFT_META_MARK, unix.NFTA_META_DREG, 1), bits, setMark}, changes, 0x2000, ""},
		{"DNAT of IPv4, revision 0", v4, []nft.Expression{xt("target", "DNAT", 0, range1(1, 3)...)}, translates, 0, ""},
		{"DNAT, revision 1", v6, []nft.Expression{xt("target", "DNAT", 1, range2(1)...)}, translates, 0, ""},
		{"DNAT, revision 2", v6, []nft.Expression{xt("target", "DNAT", 2, range2(1|8)...)}, translates, 0, ""},
		{"nft's own masquerade", v4, []nft.Expression{{Name: "masq"}}, translates, 0, ""},

		{"queue", v4, []nft.Expression{verdictOf(3)}, 0, 0, "verdict 3"},
		{"a jump to nowhere", v4, []nft.Expression{leadsTo(unix.NFT_JUMP, "")}, 0, 0, "verdict -3"},
		{"accept that names a chain", v4, []nft.Expression{leadsTo(nfAccept, "X")}, 0, 0, "verdict 1"},
		{"a match behind a jump", v4, []nft.Expression{jump("X"), xt("match", "tcp", 0)}, 0, 0, "behind a verdict"},
		{"two targets", v4, []nft.Expression{{Name: "masq"}, {Name: "masq"}}, 0, 0, "behind a verdict"},
		{"an ipset", v4, []nft.Expression{xt("match", "set", 4)}, 0, 0, `match "set"`},
		{"what adds to an ipset", v4, []nft.Expression{xt("target", "SET", 3)}, 0, 0, `target "SET"`},
		{"hashlimit", v4, []nft.Expression{xt("match", "hashlimit", 3)}, 0, 0, `match "hashlimit"`},
		{"every third packet", v4, []nft.Expression{xt("match", "statistic", 0, 1, 0)}, 0, 0, "counts packets"},
		{"nft's set", v4, []nft.Expression{{Name: "lookup"}}, 0, 0, `"lookup"`},
		{"a limit", v4, []nft.Expression{{Name: "limit"}}, 0, 0, `"limit"`},
		{"NETMAP", v4, []nft.Expression{xt("target", "NETMAP", 0, range1(1, 1)...)}, 0, 0, "NETMAP"},
		{"ports with an offset", v4, []nft.Expression{xt("target", "DNAT", 2, range2(0x23)...)}, 0, 0, "0x23"},
		{"two ranges", v4, []nft.Expression{xt("target", "DNAT", 0, range1(2, 1)...)}, 0, 0, "not one range"},
		{"a range that is cut off", v4, []nft.Expression{xt("target", "SNAT", 1, range2(1)[:39]...)}, 0, 0, "too short"},
		{"a later revision", v4, []nft.Expression{xt("target", "DNAT", 3, range2(1)...)}, 0, 0, "revision 3"},
		{"MARK of another revision", v4, []nft.Expression{xt("target", "MARK", 1, mark...)}, 0, 0, "revision 1"},
		{"a mark of unknown bits", v4, []nft.Expression{setMark}, 0, 0, "meta data"},
		{"a priority", v4, []nft.Expression{bits, meta(unix.NFT_META_PRIORITY, unix.NFTA_META_SREG, 1)}, 0, 0, "meta data"},
		{"what writes the packet", v4, []nft.Expression{{Name: "payload", Data: number(nil, unix.NFTA_PAYLOAD_SREG, 1)}}, 0, 0, "changes the packet"},
		{"what writes conntrack", v4, []nft.Expression{{Name: "ct", Data: number(nil, unix.NFTA_CT_SREG, 1)}}, 0, 0, "changes conntrack"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := readRule(test.family, listOf(test.list...))
			switch {
			case test.bad != "":
				if err == nil || !strings.Contains(err.Error(), test.bad) {
					t.Errorf("got error %v, want one with %q", err, test.bad)
				}
			case err != nil:
				t.Error(err)
			case got.effect != test.want || got.marks != test.marks:
				t.Errorf("effect %d and marks %#x, want %d and %#x", got.effect, got.marks, test.want, test.marks)
			}
		})
	}
}

// sourceOf returns a table with a base chain at prerouting that leads to KUBE-SERVICES.
func sourceOf(chains map[string][]nft.Rule) Source {
	src := Source{Protects: func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }}
	made := nft.ChainMap{}
	src.ID, src.Chains = tableid.IPv4.Table("nat"), made
	for name, all := range chains {
		made[name] = nft.RawChain{Name: name, Rules: slices.Values(all)}
	}
	base := made["PREROUTING"]
	if base.Rules == nil {
		base.Rules = slices.Values([]nft.Rule{listOf(jump("KUBE-SERVICES"))})
	}
	base.Base = &nft.Chain{Name: "PREROUTING", Base: true, Kind: "nat", Priority: -100}
	made["PREROUTING"] = base
	return src
}

// TestChainsThatCannotBeCopied: such a chain must be left out alone, unless no copy is correct
// without it.
func TestChainsThatCannotBeCopied(t *testing.T) {
	odd := listOf(xt("match", "hashlimit", 3))
	for _, test := range []struct {
		name        string
		chains      map[string][]nft.Rule
		leftOut     string
		unavailable string
	}{
		{"a service", map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SVC"))}, "KUBE-SVC": {odd}}, "KUBE-SVC", ""},
		{"what leads to another owner's chain", map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SVC"))}, "KUBE-SVC": {listOf(jump("DOCKER"))}, "DOCKER": {}}, "KUBE-SVC", ""},
		{"what leads to a base chain", map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SVC"))}, "KUBE-SVC": {listOf(jump("PREROUTING"))}}, "KUBE-SVC", ""},
		{"what leads to a chain that was not read", map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SVC"))}, "KUBE-SVC": {listOf(jump("KUBE-SEP"))}}, "KUBE-SVC", ""},
		{"a loop", map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SERVICES"))}}, "", ""},
		{"all services", map[string][]nft.Rule{"KUBE-SERVICES": {odd}}, "", "KUBE-SERVICES"},
		{"the mark", map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-MARK-MASQ"))}, "KUBE-MARK-MASQ": {odd}}, "", "KUBE-MARK-MASQ"},
		{"a protected rule of the base chain", map[string][]nft.Rule{"PREROUTING": {listOf(xt("match", "hashlimit", 3), jump("KUBE-SERVICES"))}, "KUBE-SERVICES": {}}, "", "a protected rule of PREROUTING"},
		{"a base chain without protected rules", map[string][]nft.Rule{"PREROUTING": {odd}}, "", "no base chain"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := Translate(sourceOf(test.chains), nil)
			if test.unavailable != "" {
				if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), test.unavailable) {
					t.Errorf("got %v, want unavailable for %s", err, test.unavailable)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, l := range c.LeftOut() {
				names = append(names, l.Chain)
				if l.Reason == "" {
					t.Errorf("%s is left out for no reason", l.Chain)
				}
			}
			if got := strings.Join(names, " "); got != test.leftOut {
				t.Errorf("left out: %q, want %q", got, test.leftOut)
			}
		})
	}
}

// TestAChainThatIsProtectedNoMore: a chain is no longer protected. Chains that lead to it must be
// read again, although their versions are the same.
func TestAChainThatIsProtectedNoMore(t *testing.T) {
	src := sourceOf(map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SVC"))}, "KUBE-SVC": {listOf(jump("KUBE-SEP"))}, "KUBE-SEP": {listOf(verdictOf(nfAccept))}})
	chains := src.Chains.(nft.ChainMap)
	for name, c := range chains {
		c.Version = 1
		chains[name] = c
	}
	first, err := Translate(src, nil)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Translate(src, first)
	if err != nil || again.chains["KUBE-SVC"] != first.chains["KUBE-SVC"] {
		t.Fatalf("a chain of the same version was read again, %v", err)
	}
	src.Protects = func(chain string) bool { return chain == "KUBE-SERVICES" || chain == "KUBE-SVC" }
	if again, err = Translate(src, first); err != nil {
		t.Fatal(err)
	}
	if left := again.LeftOut(); len(left) != 1 || left[0].Chain != "KUBE-SVC" || again.chains["KUBE-SEP"] != nil {
		t.Errorf("left out: %v", left)
	}
}

// TestAChainThatIsLeftOutByNow: such a chain must not count as unchanged, although its version is
// the same.
func TestAChainThatIsLeftOutByNow(t *testing.T) {
	src := sourceOf(map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SVC"))}, "KUBE-SVC": {listOf(verdictOf(nfAccept))}})
	chains := src.Chains.(nft.ChainMap)
	svc := chains["KUBE-SVC"]
	svc.Version = 1
	chains["KUBE-SVC"] = svc
	first, err := Translate(src, nil)
	if err != nil {
		t.Fatal(err)
	}
	svc.LeftOut = true
	chains["KUBE-SVC"] = svc
	again, err := Translate(src, first)
	if err != nil {
		t.Fatal(err)
	}
	if left := again.LeftOut(); len(left) != 1 || left[0].Chain != "KUBE-SVC" {
		t.Errorf("left out: %v", left)
	}
}

// TestOtherOwnersRules: rules before ours are copied, with the chains to which they lead. The copy
// must accept packets that they would translate. If they cannot be copied, the hook is blocked.
// Rules behind ours do not matter.
func TestOtherOwnersRules(t *testing.T) {
	ours, accepts, logs, leads := listOf(jump("KUBE-SERVICES")), listOf(verdictOf(nfAccept)), listOf(xt("target", "LOG", 0)), listOf(jump("DOCKER"))
	set := listOf(xt("match", "set", 4), verdictOf(nfAccept))
	dnat := listOf(xt("match", "tcp", 0), xt("target", "DNAT", 2, range2(1)...))
	mark := listOf(xt("target", "MARK", 2, 1, 0, 0, 0, 1, 0, 0, 0))
	for _, test := range []struct {
		name    string
		rules   []nft.Rule
		docker  []nft.Rule
		copied  int
		blocked bool
	}{
		{"nothing", []nft.Rule{ours}, nil, 1, false},
		{"accept before", []nft.Rule{accepts, ours}, nil, 2, false},
		{"accept between", []nft.Rule{ours, accepts, ours}, nil, 3, false},
		{"accept behind", []nft.Rule{ours, accepts}, nil, 1, false},
		{"log before", []nft.Rule{logs, ours}, nil, 1, false},
		{"DNAT before", []nft.Rule{dnat, ours}, nil, 2, false},
		{"a mark before", []nft.Rule{mark, ours}, nil, 1, true},
		{"a list and a verdict before", []nft.Rule{listOf(xt("match", "recent", 1), verdictOf(unix.NFT_RETURN)), ours}, nil, 1, true},
		{"accept of an ipset before", []nft.Rule{set, ours}, nil, 1, true},
		{"another owner's chain before", []nft.Rule{leads, ours}, []nft.Rule{dnat, accepts}, 2, false},
		{"one with an ipset", []nft.Rule{leads, ours}, []nft.Rule{dnat, set}, 1, true},
		{"one that leads to ours", []nft.Rule{leads, ours}, []nft.Rule{ours}, 1, true},
		{"one that leads to itself", []nft.Rule{leads, ours}, []nft.Rule{leads}, 2, false},
		{"one that was not read", []nft.Rule{listOf(jump("GONE")), ours}, nil, 1, true},
		{"another owner's chain behind", []nft.Rule{ours, leads}, []nft.Rule{set}, 1, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := Translate(sourceOf(map[string][]nft.Rule{"PREROUTING": test.rules, "KUBE-SERVICES": {}, "DOCKER": test.docker}), nil)
			if err != nil {
				t.Fatal(err)
			}
			body := c.hooks[Prerouting].body
			if got := len(c.hooks[Prerouting].rules); got != test.copied || (c.Blocked(Prerouting) != "") != test.blocked {
				t.Errorf("%d rules copied, blocked by %q; want %d and %t", got, c.Blocked(Prerouting), test.copied, test.blocked)
			}
			for _, to := range body.jumps {
				if c.chains[to] == nil {
					t.Errorf("a rule leads to %s, which is not copied", to)
				}
			}
			all := c.hooks[Prerouting].rules
			if c.chains["DOCKER"] != nil {
				all = append(all, c.rules["DOCKER"]...)
			}
			for _, r := range all {
				_ = nft.Rule{Expressions: r.expressions}.Each(func(e nft.Expression) error {
					if e.Name == "nat" || e.Name == "target" {
						t.Errorf("another owner's rule is copied with its %s", e.Name)
					}
					return nil
				})
			}
		})
	}
}

// FuzzTranslate: a rule may have any bytes. The copy must have only expressions of its list, in
// full.
func FuzzTranslate(f *testing.F) {
	for _, r := range []nft.Rule{
		listOf(xt("match", "tcp", 0, make([]byte, 16)...), xt("target", "DNAT", 2, range2(3)...)),
		listOf(xt("target", "DNAT", 0, range1(1, 3)...)), listOf(xt("target", "MARK", 2, 0, 64, 0, 0, 0, 64, 0, 0)),
		listOf(jump("KUBE-SVC")), listOf(verdictOf(nfAccept)), {Expressions: acceptAsIs(0x4000).expressions},
		{Expressions: gate(Output).expressions}, listOf(xt("match", "set", 4)),
	} {
		f.Add(false, r.Expressions)
		f.Add(true, r.Expressions)
	}
	allowed := []string{"cmp", "range", "bitwise", "meta", "payload", "ct", "immediate", "nat", "masq", "redir", "match", "target"}
	f.Fuzz(func(t *testing.T, v6 bool, data []byte) {
		src := sourceOf(map[string][]nft.Rule{"KUBE-SERVICES": {listOf(jump("KUBE-SVC"))}, "KUBE-SVC": {{Expressions: data}}, "PREROUTING": {{Expressions: data}, listOf(jump("KUBE-SERVICES"))}})
		if v6 {
			src.ID.Family = tableid.IPv6
		}
		c, err := Translate(src, nil)
		if err != nil {
			if !errors.Is(err, ErrUnavailable) {
				t.Fatal(err)
			}
			return
		}
		for name, chain := range c.chains {
			if len(c.rules[name]) != len(chain.digests) {
				t.Errorf("%s has %d rules and %d digests", name, len(c.rules[name]), len(chain.digests))
			}
			for _, r := range c.rules[name] {
				err := nft.Rule{Expressions: r.expressions}.Each(func(e nft.Expression) error {
					of := nft.String(attr(e.Data, unix.NFTA_TARGET_NAME))
					if !slices.Contains(allowed, e.Name) || e.Name == "target" && of != "MARK" || e.Name == "match" && !slices.Contains(plainMatches, of) {
						t.Errorf("%s has expression %s %q", name, e.Name, of)
					}
					return nil
				})
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		}
	})
}
