// Package interleavings runs canaryd, owners that keep writing, and flushers at the same time,
// in every order that random numbers can make.
package interleavings

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A step is the most work of a program without another actor in between: one command, or one
// table of a restore.
type step struct {
	name string
	// free: it does not take the xtables lock (iptables-legacy-save, 1.8.9).
	free bool
	do   func() error
}

// slots is the greatest number of services.
const slots = 5

// proxyCanary is the chain whose absence from mangle shows kube-proxy a flush.
const proxyCanary = "KUBE-PROXY-CANARY"

// A proxy stands in for the kube-proxy of one family. To a neighbour it looks like kube-proxy
// 1.36. A sync is one restore of filter and nat, with all shared chains, and the chains of
// changed services only. It deletes the chains of removed services while a save still shows
// them. A full sync first makes sure of jumps, and follows a failed sync, or the loss of the
// canary in mangle.
type proxy struct {
	family   rules.Family
	programs scenario.Flusher

	services [slots]int   // the version of each; 0: no service
	counter  int          // of versions
	changed  map[int]bool // since the last successful sync
	full     bool         // the next sync is a full one
	planted  bool         // its canary was planted
	waited   int          // polls in which other tables still had the canary
	pending  []step
	noticed  int // number of noticed flushes
}

func newProxy(family rules.Family, p scenario.Flusher) *proxy {
	return &proxy{family: family, programs: p, changed: map[int]bool{}, full: true}
}

// change adds, replaces or removes a service.
func (p *proxy) change(slot int, remove bool) {
	p.changed[slot] = true
	if remove {
		p.services[slot] = 0
		return
	}
	p.counter++
	p.services[slot] = p.counter
}

// idle reports whether nothing is left to write.
func (p *proxy) idle() bool {
	return len(p.pending) == 0 && !p.full && len(p.changed) == 0 && p.planted
}

// next returns kube-proxy's next step; ok is false if there is none.
func (p *proxy) next() (s step, ok bool) {
	if len(p.pending) == 0 {
		switch {
		case p.full || len(p.changed) > 0:
			p.sync()
		case !p.planted:
			p.plant()
		default:
			return step{}, false
		}
	}
	s, p.pending = p.pending[0], p.pending[1:]
	return s, true
}

func (p *proxy) add(name string, free bool, do func() error) {
	p.pending = append(p.pending, step{name: fmt.Sprintf("proxy %s %s", p.family, name), free: free, do: do})
}

// plant makes sure of the canary, table by table, mangle first.
func (p *proxy) plant() {
	for _, t := range protect.Always() {
		p.add("plants its canary in "+string(t), false, func() error {
			_ = p.write(t, "-N "+proxyCanary) // it may exist
			return nil
		})
	}
	p.add("has planted", true, func() error { p.planted, p.waited = true, 0; return nil })
}

// poll plays one look of its monitor.
func (p *proxy) poll() step {
	return step{name: fmt.Sprintf("proxy %s polls", p.family), do: func() error {
		if !p.planted || len(p.pending) > 0 || p.has(rules.Mangle, proxyCanary) {
			return nil
		}
		// A flush may take table by table, so it waits for the other tables, 5 s at most.
		if p.waited++; p.waited < 5 && (p.has(rules.Nat, proxyCanary) || p.has(rules.Filter, proxyCanary)) {
			return nil
		}
		p.noticed++
		p.full, p.planted = true, false
		return nil
	}}
}

// A jump is a rule that a full sync makes sure of.
type jump struct {
	table       rules.TableName
	from, match string
	to          string
}

var jumps = []jump{
	{rules.Filter, "INPUT", `-m comment --comment "kubernetes health check service ports" `, "KUBE-NODEPORTS"},
	{rules.Filter, "FORWARD", `-m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" `, "KUBE-SERVICES"},
	{rules.Filter, "OUTPUT", `-m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" `, "KUBE-SERVICES"},
	{rules.Filter, "FORWARD", `-m comment --comment "kubernetes forwarding rules" `, "KUBE-FORWARD"},
	{rules.Nat, "OUTPUT", `-m comment --comment "kubernetes service portals" `, "KUBE-SERVICES"},
	{rules.Nat, "PREROUTING", `-m comment --comment "kubernetes service portals" `, "KUBE-SERVICES"},
	{rules.Nat, "POSTROUTING", `-m comment --comment "kubernetes postrouting rules" `, "KUBE-POSTROUTING"},
}

func (j jump) spec() string { return j.match + "-j " + j.to }

// sync plans the steps of one sync. Later changes are for the next.
func (p *proxy) sync() {
	full, changed, services := p.full, p.changed, p.services
	p.changed, p.full = map[int]bool{}, false
	failed := func(err error) error {
		if err != nil { // kube-proxy: "Sync failed", and then a full sync
			p.full, p.pending = true, nil
			for slot := range changed {
				p.changed[slot] = true
			}
		}
		return nil
	}
	kind := "partial"
	if full {
		kind = "full"
		p.ensureJumps()
	}
	var saved []string
	p.add("saves nat", true, func() error { saved = p.chains(rules.Nat); return nil })
	p.add(kind+" sync of filter", false, func() error { return failed(p.restore(rules.Filter, p.filter(services))) })
	p.add(kind+" sync of nat", false, func() error {
		return failed(p.restore(rules.Nat, p.nat(services, saved, func(slot int) bool { return full || changed[slot] })))
	})
}

// ensureJumps makes sure of chains and jumps, each by commands of its own.
func (p *proxy) ensureJumps() {
	for _, j := range jumps {
		p.add("ensures "+j.to, false, func() error { _ = p.write(j.table, "-N "+j.to); return nil })
		missing := false
		p.add("checks "+j.from+" to "+j.to, false, func() error {
			missing = p.write(j.table, "-C "+j.from+" "+j.spec()) != nil
			return nil
		})
		p.add("ensures "+j.from+" to "+j.to, false, func() error {
			if missing {
				_ = p.write(j.table, "-I "+j.from+" "+j.spec()) // a failure waits for the next sync
			}
			return nil
		})
	}
}

// filter returns the chains of filter with their rules.
func (p *proxy) filter(services [slots]int) []string {
	lines := []string{":KUBE-SERVICES - [0:0]", ":KUBE-FORWARD - [0:0]", ":KUBE-NODEPORTS - [0:0]"}
	for slot, version := range services {
		if version > 0 && endpoints(version) == 0 {
			lines = append(lines, fmt.Sprintf(`-A KUBE-SERVICES -d %s -p tcp -m comment --comment "ns/s%d has no endpoints" -m tcp --dport 80 -j REJECT`, p.clusterIP(slot), slot))
		}
	}
	return append(lines,
		"-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP",
		`-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT`)
}

// nat returns the chains of nat with their rules: the shared chains and those of written
// services. It also deletes the chains that a save showed and that no service has any more.
func (p *proxy) nat(services [slots]int, saved []string, written func(slot int) bool) []string {
	lines := []string{":KUBE-SERVICES - [0:0]", ":KUBE-NODEPORTS - [0:0]", ":KUBE-POSTROUTING - [0:0]", ":KUBE-MARK-MASQ - [0:0]"}
	body := []string{
		"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
		"-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0",
		`-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE`,
		"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
	}
	active := map[string]bool{}
	for slot, version := range services {
		n := endpoints(version)
		if version == 0 || n == 0 {
			continue
		}
		service := serviceChain(slot)
		active[service] = true
		body = append(body, fmt.Sprintf(`-A KUBE-SERVICES -d %s -p tcp -m comment --comment "ns/s%d cluster IP" -m tcp --dport 80 -j %s`, p.clusterIP(slot), slot, service))
		var chains []string
		for i := range n {
			chain := endpointChain(slot, version, i)
			active[chain] = true
			chains = append(chains, chain)
		}
		if !written(slot) {
			continue
		}
		lines = append(lines, ":"+service+" - [0:0]")
		for i, chain := range chains {
			lines = append(lines, ":"+chain+" - [0:0]")
			share := ""
			if i < n-1 {
				share = "-m statistic --mode random --probability 0.50000000000 "
			}
			body = append(body,
				fmt.Sprintf(`-A %s -m comment --comment "ns/s%d" %s-j %s`, service, slot, share, chain),
				fmt.Sprintf(`-A %s -s %s -m comment --comment "ns/s%d" -j KUBE-MARK-MASQ`, chain, p.host(slot, version, i), slot),
				fmt.Sprintf(`-A %s -p tcp -m comment --comment "ns/s%d" -m tcp -j DNAT --to-destination %s`, chain, slot, p.endpoint(slot, version, i)))
		}
	}
	body = append(body, `-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS`)
	var drop []string
	for _, chain := range saved {
		if !active[chain] && (strings.HasPrefix(chain, "KUBE-SVC-") || strings.HasPrefix(chain, "KUBE-SEP-")) {
			lines = append(lines, ":"+chain+" - [0:0]")
			drop = append(drop, "-X "+chain)
		}
	}
	return slices.Concat(lines, body, drop)
}

// wanted returns the proxy's chains that the tables ought to hold, with their rules as
// it writes them, by table.
func (p *proxy) wanted() map[rules.TableName][]string {
	return map[rules.TableName][]string{
		rules.Filter: p.filter(p.services),
		rules.Nat:    p.nat(p.services, nil, func(int) bool { return true }),
	}
}

// endpoints returns the number of endpoints of a service's version.
func endpoints(version int) int { return [...]int{1, 2, 1, 2, 0}[version%5] }

func serviceChain(slot int) string { return "KUBE-SVC-" + padded(fmt.Sprintf("S%c", 'A'+slot)) }

func endpointChain(slot, version, i int) string {
	digits := strings.Map(func(r rune) rune { return r - '0' + 'A' }, fmt.Sprint(version))
	return "KUBE-SEP-" + padded(fmt.Sprintf("E%c%c%s", 'A'+slot, 'A'+i, digits))
}

// padded makes 16 digits of base 32, like kube-proxy's hashes.
func padded(s string) string { return s + strings.Repeat("7", 16-len(s)) }

func (p *proxy) clusterIP(slot int) string {
	if p.family == rules.IPv6 {
		return fmt.Sprintf("fd00:10:96::%x/128", slot+1)
	}
	return fmt.Sprintf("10.96.0.%d/32", slot+1)
}

func (p *proxy) host(slot, version, i int) string {
	if p.family == rules.IPv6 {
		return fmt.Sprintf("fd00:10:244:%x:%x::%x/128", slot+1, version, i+1)
	}
	return fmt.Sprintf("10.%d.%d.%d/32", 100+slot*2+i, version/256, version%256)
}

func (p *proxy) endpoint(slot, version, i int) string {
	host, _, _ := strings.Cut(p.host(slot, version, i), "/")
	if p.family == rules.IPv6 {
		return "[" + host + "]:8080"
	}
	return host + ":8080"
}

// write writes lines to one table. An error means that a line failed.
func (p *proxy) write(t rules.TableName, lines ...string) error { return p.restore(t, lines) }

func (p *proxy) restore(t rules.TableName, lines []string) error {
	return p.programs.RestoreNoflush(context.Background(), p.family, section(t, lines...))
}

func section(t rules.TableName, lines ...string) string {
	return "*" + string(t) + "\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
}

// chains returns the user chains of the table in a save.
func (p *proxy) chains(t rules.TableName) []string {
	text, err := p.programs.Save(context.Background(), p.family)
	if err != nil {
		return nil
	}
	var found []string
	inside := false
	for line := range strings.Lines(text) {
		switch {
		case line[0] == '*':
			inside = strings.TrimSpace(line[1:]) == string(t)
		case inside && line[0] == ':':
			name, _, _ := strings.Cut(line[1:], " ")
			if !rules.Builtin(t, name) {
				found = append(found, name)
			}
		}
	}
	return found
}

func (p *proxy) has(t rules.TableName, chain string) bool { return slices.Contains(p.chains(t), chain) }
