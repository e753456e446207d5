package native

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A saying is how an attribute of an expression is said.
type saying struct {
	label string
	as    sayingKind
	names []string // of numbers
}

type sayingKind uint8

const (
	asNumber sayingKind = iota // or bytes, if it has another length
	asText
	asData // a value or a verdict
	asSet
	asList // of expressions
	asExpression
	unsaid // it is the kernel's own number, or what packets counted
)

// The names of numbers, in linux/netfilter/nf_tables.h and nf_conntrack_common.h.
var (
	metaKeys = []string{"len", "protocol", "priority", "mark", "iif", "oif", "iifname", "oifname", "iiftype", "oiftype", "skuid", "skgid",
		"nftrace", "rtclassid", "secmark", "nfproto", "l4proto", "ibrname", "obrname", "pkttype", "cpu", "iifgroup", "oifgroup", "cgroup"}
	ctKeys     = []string{"state", "direction", "status", "mark", "secmark", "expiration", "helper", "l3protocol", "src", "dst", "protocol", "proto-src", "proto-dst", "labels"}
	operators  = []string{"==", "!=", "<", "<=", ">", ">="}
	bases      = []string{"link", "network", "transport", "inner", "tunnel"}
	natTypes   = []string{"snat", "dnat"}
	numgens    = []string{"inc", "random"}
	fibResults = []string{"0", "oif", "oifname", "type"}
)

// sayings are what the attributes of expressions mean, by number from 1 on. Those that are not
// here are said by their number.
var sayings = map[string][]saying{
	"meta":      {{label: "dreg"}, {label: "key", names: metaKeys}, {label: "sreg"}},
	"payload":   {{label: "dreg"}, {label: "base", names: bases}, {label: "offset"}, {label: "len"}, {label: "sreg"}, {label: "csum-type"}, {label: "csum-offset"}, {label: "csum-flags"}},
	"cmp":       {{label: "sreg"}, {label: "op", names: operators}, {label: "data", as: asData}},
	"range":     {{label: "sreg"}, {label: "op", names: operators}, {label: "from", as: asData}, {label: "to", as: asData}},
	"bitwise":   {{label: "sreg"}, {label: "dreg"}, {label: "len"}, {label: "mask", as: asData}, {label: "xor", as: asData}, {label: "op"}, {label: "data", as: asData}, {label: "sreg2"}},
	"byteorder": {{label: "sreg"}, {label: "dreg"}, {label: "op"}, {label: "len"}, {label: "size"}},
	"lookup":    {{label: "set", as: asSet}, {label: "sreg"}, {label: "dreg"}, {as: unsaid}, {label: "flags"}},
	"immediate": {{label: "dreg"}, {label: "data", as: asData}},
	"nat":       {{label: "type", names: natTypes}, {label: "family"}, {label: "addr-min"}, {label: "addr-max"}, {label: "proto-min"}, {label: "proto-max"}, {label: "flags"}},
	"masq":      {{label: "flags"}, {label: "proto-min"}, {label: "proto-max"}},
	"redir":     {{label: "proto-min"}, {label: "proto-max"}, {label: "flags"}},
	"counter":   {{as: unsaid}, {as: unsaid}, {as: unsaid}},
	"last":      {{as: unsaid}, {as: unsaid}, {as: unsaid}},
	"limit":     {{label: "rate"}, {label: "unit"}, {label: "burst"}, {label: "type"}, {label: "flags"}, {as: unsaid}},
	"quota":     {{label: "bytes"}, {label: "flags"}, {as: unsaid}, {as: unsaid}},
	"ct":        {{label: "dreg"}, {label: "key", names: ctKeys}, {label: "direction"}, {label: "sreg"}},
	"fib":       {{label: "dreg"}, {label: "result", names: fibResults}, {label: "flags"}},
	"numgen":    {{label: "dreg"}, {label: "mod"}, {label: "type", names: numgens}, {label: "offset"}},
	"hash":      {{label: "sreg"}, {label: "dreg"}, {label: "len"}, {label: "mod"}, {label: "seed"}, {label: "offset"}, {label: "type"}},
	"reject":    {{label: "type"}, {label: "code"}},
	"log":       {{label: "group"}, {label: "prefix", as: asText}, {label: "snaplen"}, {label: "threshold"}, {label: "level"}, {label: "flags"}},
	"objref":    {{label: "type"}, {label: "name", as: asText}, {label: "sreg"}, {label: "set", as: asSet}, {as: unsaid}},
	"dynset": {{label: "set", as: asSet}, {as: unsaid}, {label: "op"}, {label: "sreg-key"}, {label: "sreg-data"}, {label: "timeout"}, {label: "expression", as: asExpression},
		{as: unsaid}, {label: "flags"}, {label: "expressions", as: asList}},
	"match":  {{label: "name", as: asText}, {label: "rev"}, {label: "info"}},
	"target": {{label: "name", as: asText}, {label: "rev"}, {label: "info"}},
}

// expressions says a list of expressions, each between brackets.
func (w *words) expressions(list []byte, depth int) string {
	var all []string
	for a, err := range attributes(list) {
		if err != nil {
			return strings.Join(append(all, "[ not readable ]"), " ")
		}
		all = append(all, w.expression(a.value, depth))
	}
	return strings.Join(all, " ")
}

// expression says one expression, the content of an NFTA_LIST_ELEM.
func (w *words) expression(elem []byte, depth int) string {
	kind := nft.String(attrOf(elem, unix.NFTA_EXPR_NAME))
	known := sayings[kind]
	text := "[ " + name(kind)
	for a, err := range attributes(attrOf(elem, unix.NFTA_EXPR_DATA)) {
		if err != nil {
			return text + " not readable ]"
		}
		s := saying{label: strconv.Itoa(int(a.kind))}
		if n := int(a.kind); n >= 1 && n <= len(known) {
			s = known[n-1]
		}
		if s.as != unsaid {
			text += " " + s.label + " " + w.value(s, a.value, depth)
		}
	}
	return text + " ]"
}

func (w *words) value(s saying, value []byte, depth int) string {
	switch s.as {
	case asText:
		return name(nft.String(value))
	case asData:
		if data := nft.AttrPath(value, unix.NFTA_DATA_VALUE); data != nil {
			return "0x" + hex.EncodeToString(data)
		}
		return w.verdict(value, depth)
	case asSet:
		return w.setOfRule(nft.String(value), depth)
	case asList:
		return "{ " + w.expressions(value, depth) + " }"
	case asExpression:
		return w.expression(value, depth)
	}
	if n, ok := numberOf(value); ok {
		return nameOf(s.names, n)
	}
	return "0x" + hex.EncodeToString(value)
}

// setOfRule says a set by its name or, if it belongs to the rule, by what is in it.
func (w *words) setOfRule(called string, depth int) string {
	s := w.sets[called]
	if s == nil || !s.Anonymous() || !w.inlines(1+len(s.Elements), depth) {
		return name(called)
	}
	var all []string
	for _, e := range s.Elements {
		all = append(all, w.element(s, e, depth+1))
	}
	return "{ " + strings.Join(all, ", ") + " }"
}

// numberOf reads a number of any length that the kernel has.
func numberOf(value []byte) (n uint64, ok bool) {
	switch len(value) {
	case 1, 2, 4, 8:
	default:
		return 0, false
	}
	for _, b := range value {
		n = n<<8 | uint64(b)
	}
	return n, true
}

// generic says attributes by their numbers.
func generic(list []byte) string {
	var all []string
	for a, err := range attributes(list) {
		if err != nil {
			return "0x" + hex.EncodeToString(list)
		}
		if n, ok := numberOf(a.value); ok {
			all = append(all, fmt.Sprintf("%d %d", a.kind, n))
			continue
		}
		all = append(all, fmt.Sprintf("%d 0x%s", a.kind, hex.EncodeToString(a.value)))
	}
	return strings.Join(all, " ")
}
