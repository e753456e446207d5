package interleavings

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A plot is the subject of an episode. A file from before one pod was added and another one
// removed is restored and flushed, in some order. Meanwhile a third pod may be removed.
type plot struct {
	troupe *troupe
	saved  map[rules.Family]string
	scenes map[rules.Family]*scene
}

// A scene has the state of one family's nat in an episode.
type scene struct {
	restored bool         // the file's rules are in the table, as far as is known
	read     bool         // canaryd has read them in a session, and may forget them
	told     bool         // canaryd has read them in a look,
	stood    map[int]bool // and each time until then saw these pods' chains
	gone     map[int]bool // pods that were removed in time
	away     map[int]bool // pods whose removal canaryd can know
	chains   []string     // protected chains at first
	free     bool         // canaryd cannot know the present pods
	mayGo    bool         // a pod may still be removed
}

// newPlot lets kube-proxy and a stranger act as ever, while all others follow the plot.
func newPlot(w *world) *troupe {
	tr := newTroupe(w)
	pl := &plot{troupe: tr, scenes: map[rules.Family]*scene{}}
	tr.plot = pl
	w.onRead = func(s iptables.Snapshot) { pl.read(w, s) }
	for _, a := range w.cast {
		switch c := a.pods; {
		case c != nil:
			a.next = func(w *world) (step, bool) {
				if sc := pl.scenes[c.family]; len(c.pending) == 0 && sc.mayGo && len(c.pods) > 0 {
					sc.mayGo = false
					c.del(w.rng.IntN(len(c.pods)))
				}
				return pop(&c.pending)
			}
		case a.who == byFlusher:
			var last time.Time
			a.weight = 8
			a.next = func(w *world) (step, bool) {
				// There is mostly a pause between two commands.
				if time.Now().Equal(last) && w.rng.IntN(10) > 0 {
					return step{}, false
				}
				last = time.Now()
				return pop(&tr.flusher.pending)
			}
		}
	}
	return tr
}

func pop(pending *[]step) (s step, ok bool) {
	if len(*pending) == 0 {
		return step{}, false
	}
	s, *pending = (*pending)[0], (*pending)[1:]
	return s, true
}

// begin saves a file, changes the pods, waits until canaryd has learned that, and plans the
// rest.
func (pl *plot) begin(w *world) {
	pl.saved = map[rules.Family]string{}
	w.drive(func() {
		for _, c := range pl.troupe.pods {
			pl.saved[c.family] = w.Save(c.family)
			nat := pl.nat(w, c.family)
			c.pods = slices.DeleteFunc(c.pods, func(n int) bool { return !complete(nat, n) }) // canaryd cannot know the others
			if len(c.pods) > 0 {
				c.del(w.rng.IntN(len(c.pods)))
			}
			for len(c.pods) < 3 {
				c.add()
			}
			for s, ok := pop(&c.pending); ok; s, ok = pop(&c.pending) {
				w.do(&actor{who: byOwner}, s, "in calm")
			}
		}
	})
	// canaryd renews marks later if that took long the last time.
	for range 20 {
		w.turn()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if !pl.current(w) {
			break
		}
	}
	for _, c := range pl.troupe.pods {
		sc := &scene{gone: map[int]bool{}, away: map[int]bool{}, mayGo: w.rng.IntN(2) == 0}
		nat := pl.nat(w, c.family)
		for _, chain := range nat.Chains {
			if w.ledger.protects(chain.Name) {
				sc.chains = append(sc.chains, chain.Name)
			}
		}
		for n := range c.counter + 1 {
			sc.gone[n] = !slices.Contains(c.pods, n) && nat.Chain(podChain(n)) == nil
		}
		pl.scenes[c.family] = sc
	}
	pl.plan(w)
}

// plan plans the flusher's commands, each step one table.
func (pl *plot) plan(w *world) {
	families := [][]rules.Family{{rules.IPv4}, rules.Families()}[w.rng.IntN(2)]
	commands := [][]string{
		{"restore", "flush"}, {"restore", "flush"}, {"flush", "restore", "flush"}, {"restore", "flush", "restore", "flush"},
		{"restore", "delete"}, {"restore"}, {"flush"},
	}[w.rng.IntN(7)]
	for _, command := range commands {
		tables := [][]rules.TableName{{rules.Nat}, protect.Always()}[w.rng.IntN(2)]
		for _, f := range families {
			for _, t := range tables {
				pl.troupe.flusher.add(fmt.Sprintf("%s %s %s", command, f, t), func(ctx context.Context) error { return pl.act(ctx, w, command, f, t) })
			}
		}
	}
}

func (pl *plot) act(ctx context.Context, w *world, command string, f rules.Family, t rules.TableName) error {
	programs, sc := scenario.FakePrograms{Fake: w.Fake}, pl.scenes[f]
	if t == rules.Nat {
		pl.note(w, command, f, sc)
	}
	switch command {
	case "restore":
		w.ledger.replace(place{f, t, ""})
		return programs.Restore(ctx, f, "*"+string(t)+"\n"+savedTable(pl.saved[f], t)+"COMMIT\n")
	case "delete":
		if err := programs.Flush(ctx, f, t, ""); err != nil {
			return err
		}
		return programs.DeleteChains(ctx, f, t)
	default:
		return programs.Flush(ctx, f, t, "")
	}
}

// note records the effect of a command on nat on canaryd's possible knowledge.
func (pl *plot) note(w *world, command string, f rules.Family, sc *scene) {
	nat := pl.nat(w, f)
	if command != "flush" {
		// All protected rules become the former ones, those of a removed pod included.
		sc.restored, sc.read, sc.told, sc.stood, sc.away = command == "restore", false, false, map[int]bool{}, map[int]bool{}
		return
	}
	if !sc.restored || !pl.fromFile(f, nat) {
		sc.restored = false // canaryd was faster
		return
	}
	sc.restored = false
	if !sc.told {
		sc.free = true
		w.count.untold++
		return
	}
	w.count.told++
	c := pl.cni(f)
	for n := range sc.stood {
		if nat.Chain(podChain(n)) == nil && !slices.Contains(c.pods, n) {
			sc.away[n] = true
		}
	}
}

// read notes which of the file's rules canaryd has read. It may forget the rules that it read
// in a session, where it may have had another purpose. The first read counts: a chain that is
// missing in a later one was removed by its owner.
func (pl *plot) read(w *world, s iptables.Snapshot) {
	sc, nat := pl.scenes[s.Family], s.Tables[rules.Nat]
	if sc != nil && w.session && 3*sc.standing(nat) < 2*len(sc.chains) {
		clear(sc.away) // with so many missing chains no actor counts as their owner
	}
	if sc == nil || !sc.restored || sc.told || !pl.fromFile(s.Family, nat) {
		return
	}
	for n := range pl.cni(s.Family).counter + 1 {
		if stands := nat.Chain(podChain(n)) != nil; sc.stood[n] && !stands {
			delete(sc.stood, n)
		} else if stands && !sc.read {
			sc.stood[n] = true
		}
	}
	sc.read, sc.told = true, !w.session
}

// standing returns how many of the first protected chains are in nat.
func (sc *scene) standing(nat *rules.Table) (n int) {
	for _, name := range sc.chains {
		if nat.Chain(name) != nil {
			n++
		}
	}
	return n
}

// current reports whether the file has present marks.
func (pl *plot) current(w *world) bool {
	for f, saved := range pl.saved {
		now := w.Save(f)
		for _, mark := range nonce.FindAllString(saved, -1) {
			if strings.Contains(now, mark) {
				return true
			}
		}
	}
	return false
}

// fromFile reports whether nat has the file's canary.
func (pl *plot) fromFile(f rules.Family, nat *rules.Table) bool {
	c := nat.Chain(canary.DefaultChain)
	return c != nil && len(c.Rules) == 1 && strings.Contains(c.Rules[0].Spec, nonce.FindString(savedTable(pl.saved[f], rules.Nat)))
}

func (pl *plot) nat(w *world, f rules.Family) *rules.Table {
	snapshot, err := w.Fake.Read(context.Background(), f)
	if err != nil {
		w.ledger.violation("the fake cannot be read: %v", err)
	}
	return snapshot.Tables[rules.Nat]
}

func (pl *plot) cni(f rules.Family) *cni {
	return pl.troupe.pods[slices.IndexFunc(pl.troupe.pods, func(c *cni) bool { return c.family == f })]
}

// end records pods that lost their host ports, and removed pods that have some again.
func (pl *plot) end(w *world) {
	for _, c := range pl.troupe.pods {
		sc, nat := pl.scenes[c.family], pl.nat(w, c.family)
		for n := range c.counter + 1 {
			chain, jump := content(nat.Chain(podChain(n))), jumpsTo(nat, n)
			switch there := chain != nil || jump; {
			case slices.Contains(c.pods, n) && !sc.free && !complete(nat, n):
				w.ledger.violation("in the end pod %d of %s has no host port: jump %t, chain\n  %s", n, c.family, jump, texts(chain))
			case there && (sc.gone[n] && !sc.free || sc.away[n]):
				w.ledger.violation("in the end pod %d of %s is there again: jump %t, chain\n  %s", n, c.family, jump, texts(chain))
			}
		}
	}
}

// jumpsTo reports whether the chain of all host ports leads to a pod's chain.
func jumpsTo(nat *rules.Table, n int) bool {
	return slices.ContainsFunc(content(nat.Chain(hostports)), func(r rules.Rule) bool { return r.Spec == podRule(n) })
}

// complete reports whether a pod has its host port.
func complete(nat *rules.Table, n int) bool {
	return jumpsTo(nat, n) && len(content(nat.Chain(podChain(n)))) == 1
}

// TestSavedFilesThatAreFlushed plays stories of saved files next to pods. In the end each
// present pod must have its host port, and no removed pod, if canaryd has read the file's rules
// before the flush.
func TestSavedFilesThatAreFlushed(t *testing.T) { interleavings(t, newPlot, testkit.Size(1, 5)) }
