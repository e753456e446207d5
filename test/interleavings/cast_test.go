package interleavings

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An actor is a program that writes to the tables, or makes writing hard.
type actor struct {
	who    writer
	weight int // how often it is chosen, relative to the others
	next   func(w *world) (step, bool)
	held   []step // the step that waits for the lock
	proxy  *proxy // the proxy that it plays; nil: none
	pods   *cni
}

// A troupe has the programs of a world.
type troupe struct {
	proxies []*proxy
	pods    []*cni
	flusher *flusher
	plot    *plot // nil: no actors cooperate
}

func newTroupe(w *world) *troupe {
	programs := scenario.FakePrograms{Fake: w.Fake}
	tr := &troupe{flusher: &flusher{programs: programs, replaces: w.ledger.replace}}
	for _, f := range rules.Families() {
		p := newProxy(f, programs)
		tr.proxies = append(tr.proxies, p)
		w.cast = append(w.cast, &actor{who: byOwner, weight: 4, proxy: p, next: func(w *world) (step, bool) { return proxyStep(p, w.rng) }})
		c := &cni{family: f, programs: programs}
		tr.pods = append(tr.pods, c)
		w.cast = append(w.cast, &actor{who: byOwner, weight: 1, pods: c, next: func(w *world) (step, bool) { return c.next(w.rng) }})
	}
	w.cast = append(w.cast,
		&actor{who: byFlusher, weight: 3, next: func(w *world) (step, bool) { return tr.flusher.next(w.rng) }},
		&actor{who: byStranger, weight: 1, next: func(w *world) (step, bool) { return stranger(programs, w.rng) }})
	return tr
}

// proxyStep returns kube-proxy's next step, or gives it new work.
func proxyStep(p *proxy, rng *rand.Rand) (step, bool) {
	if len(p.pending) == 0 {
		switch n := rng.IntN(10); {
		case n < 6:
			for range 1 + rng.IntN(2) {
				p.change(rng.IntN(slots), rng.IntN(4) == 0)
			}
		case n < 9:
			return p.poll(), true
		default:
			p.full = true // the hourly sync, or a change of flags
		}
	}
	return p.next()
}

// A cni stands in for the portmap plugin. It writes once, rule by rule, and acts again only to
// remove rules.
type cni struct {
	family   rules.Family
	programs scenario.Flusher
	pods     []int
	counter  int
	pending  []step
}

const (
	hostports    = "CNI-HOSTPORT-DNAT"
	hostportJump = `-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT`
)

func podChain(n int) string { return fmt.Sprintf("CNI-DN-%021x", n) }

func podRule(n int) string {
	return fmt.Sprintf(`-p tcp -m comment --comment "dnat name: pod%d" -m multiport --dports %d -j %s`, n, 20000+n, podChain(n))
}

func (c *cni) next(rng *rand.Rand) (step, bool) {
	if len(c.pending) == 0 {
		if len(c.pods) > 0 && (rng.IntN(3) == 0 || len(c.pods) > 3) {
			c.del(rng.IntN(len(c.pods)))
		} else {
			c.add()
		}
	}
	var s step
	s, c.pending = c.pending[0], c.pending[1:]
	return s, true
}

func (c *cni) do(name string, lines ...string) {
	c.pending = append(c.pending, step{name: fmt.Sprintf("cni %s %s", c.family, name), do: func() error {
		return c.programs.RestoreNoflush(context.Background(), c.family, section(rules.Nat, lines...))
	}})
}

// begin writes the first pods at once, without other actors in between.
func (c *cni) begin(pods int) error {
	lines := []string{":" + hostports + " - [0:0]", "-A PREROUTING " + hostportJump, "-A OUTPUT " + hostportJump}
	for range pods {
		n, rule := c.pod()
		lines = append(lines, ":"+podChain(n)+" - [0:0]", rule, "-A "+hostports+" "+podRule(n))
	}
	return c.programs.RestoreNoflush(context.Background(), c.family, section(rules.Nat, lines...))
}

// pod adds another pod, and returns its number and the rule of its chain.
func (c *cni) pod() (n int, rule string) {
	c.counter++
	n = c.counter
	c.pods = append(c.pods, n)
	host := fmt.Sprintf("10.9.%d.%d:80", n/256, n%256)
	if c.family == rules.IPv6 {
		host = fmt.Sprintf("[fd00:9::%x]:80", n)
	}
	return n, fmt.Sprintf("-A %s -p tcp -m tcp --dport %d -j DNAT --to-destination %s", podChain(n), 20000+n, host)
}

// add plays ADD: first the chain of the pod, then the rules that lead to it.
func (c *cni) add() {
	n, rule := c.pod()
	c.do(fmt.Sprintf("adds the chain of pod %d", n), ":"+podChain(n)+" - [0:0]", rule)
	c.do("ensures "+hostports, "-N "+hostports) // fails if the chain exists
	for _, from := range []string{"PREROUTING", "OUTPUT"} {
		missing := false
		c.pending = append(c.pending, step{name: "cni checks its jump", do: func() error {
			missing = c.programs.RestoreNoflush(context.Background(), c.family, section(rules.Nat, "-C "+from+" "+hostportJump)) != nil
			return nil
		}}, step{name: "cni ensures its jump", do: func() error {
			if !missing {
				return nil
			}
			return c.programs.RestoreNoflush(context.Background(), c.family, section(rules.Nat, "-A "+from+" "+hostportJump))
		}})
	}
	c.do(fmt.Sprintf("adds pod %d", n), "-A "+hostports+" "+podRule(n))
}

// del plays DEL. Missing rules are no error to it.
func (c *cni) del(i int) {
	n := c.pods[i]
	c.pods = append(c.pods[:i:i], c.pods[i+1:]...)
	c.do(fmt.Sprintf("removes pod %d", n), "-D "+hostports+" "+podRule(n))
	c.do(fmt.Sprintf("removes the chain of pod %d", n), "-F "+podChain(n), "-X "+podChain(n))
}

// A flusher plays the programs that take rules of others.
type flusher struct {
	programs scenario.Flusher
	replaces func(place) // receives the table before saved rules replace it
	pending  []step
	saved    map[rules.Family]string
}

func (f *flusher) next(rng *rand.Rand) (step, bool) {
	if len(f.pending) == 0 {
		f.plan(rng)
	}
	var s step
	s, f.pending = f.pending[0], f.pending[1:]
	return s, true
}

func (f *flusher) add(name string, do func(ctx context.Context) error) {
	f.pending = append(f.pending, step{name: "flusher: " + name, do: func() error { return do(context.Background()) }})
}

// plan chooses the next commands. Each step is one command.
func (f *flusher) plan(rng *rand.Rand) {
	p := f.programs
	nft := p.Backend() == iptables.NFT
	families := [][]rules.Family{{rules.IPv4}, {rules.IPv6}, {rules.IPv4, rules.IPv6}, {rules.IPv4, rules.IPv6}}[rng.IntN(4)]
	tables := [][]rules.TableName{{rules.Nat}, {rules.Filter}, {rules.Mangle}, {rules.Filter, rules.Nat}, protect.Always(), protect.Always()}[rng.IntN(6)]
	switch kind := rng.IntN(10); {
	case kind < 4:
		remove := rng.IntN(2) == 0
		for _, family := range families {
			for _, t := range tables {
				f.add(fmt.Sprintf("-F %s %s", family, t), func(ctx context.Context) error { return p.Flush(ctx, family, t, "") })
				if remove {
					f.add(fmt.Sprintf("-X %s %s", family, t), func(ctx context.Context) error { return p.DeleteChains(ctx, family, t) })
				}
			}
		}
	case kind == 4:
		builtins := [][2]string{{"nat", "PREROUTING"}, {"nat", "OUTPUT"}, {"nat", "POSTROUTING"}, {"filter", "FORWARD"}, {"filter", "INPUT"}}[rng.IntN(5)]
		f.add(fmt.Sprintf("-F %s %s %s", families[0], builtins[0], builtins[1]), func(ctx context.Context) error {
			return p.Flush(ctx, families[0], rules.TableName(builtins[0]), builtins[1])
		})
	case kind == 5:
		f.add(fmt.Sprintf("restores a file with filter only, %s", families[0]), func(ctx context.Context) error {
			return p.Restore(ctx, families[0], "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n-A INPUT -i lo -j ACCEPT\nCOMMIT\n")
		})
	case kind == 6 && nft:
		f.add("nft flush ruleset", p.FlushRuleset)
	case kind == 7 && nft:
		delete := rng.IntN(2) == 0
		f.add(fmt.Sprintf("nft %s %s, delete %t", families[0], tables[0], delete), func(ctx context.Context) error {
			if delete {
				return p.DeleteTable(ctx, families[0], tables[0])
			}
			return p.FlushTable(ctx, families[0], tables[0])
		})
	case kind >= 8 && f.saved != nil:
		for _, family := range families {
			for _, t := range tables {
				f.add(fmt.Sprintf("restores a saved file's %s of %s", t, family), func(ctx context.Context) error { return f.restoreSaved(ctx, family, t) })
			}
		}
		f.add("forgets the file", func(context.Context) error { f.saved = nil; return nil })
	default:
		f.add("saves everything", func(ctx context.Context) error {
			saved := map[rules.Family]string{}
			for _, family := range rules.Families() {
				text, err := p.Save(ctx, family)
				if err != nil {
					return err
				}
				saved[family] = text
			}
			f.saved = saved
			return nil
		})
	}
}

var nonce = regexp.MustCompile(`canaryd-canary:[0-9a-f]+`)

// restoreSaved restores one table of the file. It avoids files that canaryd cannot distinguish
// from an owner's decision: a file without a canary, and a file with the present canary. The
// latter is younger than the last renewal of the marks, and lacks later rules.
func (f *flusher) restoreSaved(ctx context.Context, family rules.Family, t rules.TableName) error {
	now, err := f.programs.Save(ctx, family)
	if err != nil {
		return err
	}
	text, standing := savedTable(f.saved[family], t), savedTable(now, t)
	old := nonce.FindString(text)
	if old == "" || nonce.FindString(standing) == old || !strings.Contains(standing, "canaryd-canary:") {
		return f.programs.Flush(ctx, family, t, "")
	}
	f.replaces(place{family, t, ""})
	return f.programs.Restore(ctx, family, "*"+string(t)+"\n"+text+"COMMIT\n")
}

// savedTable returns a table's part of a save, between its name and COMMIT.
func savedTable(save string, t rules.TableName) string {
	_, text, _ := strings.Cut(save, "*"+string(t)+"\n")
	text, _, _ = strings.Cut(text, "COMMIT\n")
	return text
}

// stranger writes rules that do not concern canaryd.
func stranger(p scenario.Flusher, rng *rand.Rand) (step, bool) {
	line := []string{
		"-I FORWARD -i tun1 -j ACCEPT", "-A FORWARD -i tun2 -j DROP", "-D FORWARD -i tun1 -j ACCEPT", "-A corp -j RETURN", "-I INPUT -j corp",
	}[rng.IntN(5)]
	family := rules.Families()[rng.IntN(2)]
	return step{name: "stranger: " + line, do: func() error {
		return p.RestoreNoflush(context.Background(), family, section(rules.Filter, line))
	}}, true
}

// marked reports whether every table of every family has a canary.
func marked(w *world) bool {
	for _, f := range rules.Families() {
		for _, t := range protect.Always() {
			if len(content(w.ledger.last[f][t].Chain(canary.DefaultChain))) != 1 {
				return false
			}
		}
	}
	return true
}
