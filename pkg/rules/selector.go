package rules

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// A Selector says which chains are protected. The zero Selector protects none.
type Selector struct {
	exact  map[string]bool
	hashed []hashedName
	globs  []string
}

// A hashedName is a prefix followed by a hash of fixed length and alphabet.
type hashedName struct {
	prefix   string
	length   int // 0: any length but 0
	alphabet string
}

const (
	base32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
	hexLow = "0123456789abcdef"
)

// presets names the chains of each owner exactly: a glob such as KUBE-* would
// take in kube-router's chains and every canary.
func presets(name string) (exact []string, hashed []hashedName, ok bool) {
	switch name {
	case "kube":
		// kube-proxy 1.36 (pkg/proxy/iptables, pkg/proxy/ipvs) and kubelet;
		// KUBE-XLB-* until 1.23, KUBE-MARK-DROP until 1.27.
		exact = []string{
			"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING",
			"KUBE-MARK-MASQ", "KUBE-MARK-DROP", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-FIREWALL",
			"KUBE-IPTABLES-HINT", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL",
			"KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
		}
		for _, p := range []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-"} {
			hashed = append(hashed, hashedName{p, 16, base32})
		}
	case "cni":
		// containernetworking/plugins: portmap (CNI-DN-, and CNI-SN- until
		// 0.7), bridge and ptp with ipMasq (CNI-<24 hex digits>), firewall.
		exact = []string{
			"CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-SNAT",
			"CNI-FORWARD", "CNI-ADMIN", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2",
		}
		hashed = []hashedName{{"CNI-DN-", 0, hexLow}, {"CNI-SN-", 0, hexLow}, {"CNI-", 24, hexLow}}
	default:
		return nil, nil, false
	}
	return exact, hashed, true
}

// NewSelector reads the value of --protect: preset names (kube, cni) and globs
// of chain names, as path.Match has them. An error names the bad word.
func NewSelector(list []string) (Selector, error) {
	s := Selector{exact: map[string]bool{}}
	for _, word := range list {
		word = strings.TrimSpace(word)
		exact, hashed, ok := presets(word)
		for _, name := range exact {
			s.exact[name] = true
		}
		s.hashed = append(s.hashed, hashed...)
		switch {
		case ok:
		case word == "" || strings.ToLower(word) == word && !strings.ContainsAny(word, "*?[-_"):
			return Selector{}, fmt.Errorf("%q is neither a preset (kube, cni) nor a chain name or glob", word)
		default:
			if _, err := path.Match(word, ""); err != nil {
				return Selector{}, fmt.Errorf("%q is not a glob of chain names: %w", word, err)
			}
			s.globs = append(s.globs, word)
		}
	}
	return s, nil
}

// Protects reports whether chain is protected. Built-in chains and canaries
// never are, whatever a glob says: an owner's canary tells it of a flush, so
// nobody else may bring it back.
func (s Selector) Protects(chain string) bool {
	if chain == "" || strings.HasSuffix(chain, "-CANARY") || isBuiltinName(chain) {
		return false
	}
	if s.exact[chain] {
		return true
	}
	if slices.ContainsFunc(s.hashed, func(h hashedName) bool { return h.matches(chain) }) {
		return true
	}
	return slices.ContainsFunc(s.globs, func(g string) bool {
		ok, _ := path.Match(g, chain) // the pattern was checked by NewSelector
		return ok
	})
}

func (h hashedName) matches(chain string) bool {
	rest, ok := strings.CutPrefix(chain, h.prefix)
	if !ok || rest == "" || h.length > 0 && len(rest) != h.length {
		return false
	}
	return strings.Trim(rest, h.alphabet) == ""
}

func isBuiltinName(chain string) bool { return slices.Contains(builtin[Mangle], chain) }
