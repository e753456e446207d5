package daemon

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// --protect=auto names all owners that canaryd knows, whether or not they are on the node. The
// generation and the native tables then say which are: an owner is found by its guarded rules. It
// stays found after a flush, and a later owner is found by its first rules.

// findEvery bounds how often owners are looked for in a generation that changes all the time.
// At 5,000 services that takes 3 ms.
const findEvery = time.Second

// guards holds the owners whose rules are guarded.
type guards struct {
	edition int                      // of the generation in which owners were looked for last
	native  map[tableid.TableID]bool // the native tables of then
	at      time.Time
	cost    time.Duration
	found   []api.GuardedOwner
	idle    []string        // words of --protect that name nothing guarded
	said    map[string]bool // owners that the log has named; nil: it has named none yet
	before  map[string]bool // owners that the last run guarded; nil: that is not known
}

// ownersAt returns when findOwners is due: at once (d.made) at first, and after changes of the
// generation or the native tables; zero: not now.
func (d *Daemon) ownersAt(st *state) time.Time {
	g := &st.guards
	switch {
	case g.said == nil:
		return d.made
	case g.edition != st.generation.edition || !sameTables(g.native, st.native.tables):
		return g.at.Add(max(findEvery, baseline.CompareShare*g.cost))
	}
	return time.Time{}
}

// sameTables reports whether these are the guarded native tables, as at the last search for
// owners: one may have replaced another.
func sameTables(known map[tableid.TableID]bool, now map[tableid.TableID]*nativeTable) bool {
	for id := range now {
		if !known[id] {
			return false
		}
	}
	return len(known) == len(now)
}

// mayFindOwners reports whether every table was read, so that a list of owners, or of unguarded
// rules, is complete.
func (d *Daemon) mayFindOwners(st *state) bool {
	read := !st.anyFamily(func(fs *familyState) bool { return fs.examined.at.IsZero() })
	return read && st.allPlanted() && (!d.guardsNative() || st.native.begun)
}

// findOwners looks for owners of guarded rules, and for words of --protect that name nothing,
// for the status. The log names each once.
func (d *Daemon) findOwners(ctx context.Context, st *state) {
	g := &st.guards
	start := time.Now()
	g.found, g.idle = ownersIn(st), d.idleWords(st)
	g.edition, g.native, g.at = st.generation.edition, map[tableid.TableID]bool{}, time.Now()
	for id := range st.native.tables {
		g.native[id] = true
	}
	g.cost = g.at.Sub(start)
	first, said := g.said == nil, maps.Clone(g.said)
	if first {
		said = map[string]bool{}
	}
	var news, sinceLastRun []api.GuardedOwner
	for _, o := range g.found {
		if !said[o.Owner] {
			said[o.Owner] = true
			news = append(news, o)
			if first && g.before != nil && !g.before[o.Owner] {
				sinceLastRun = append(sinceLastRun, o)
			}
		}
	}
	g.said = said
	log := klog.FromContext(ctx)
	switch {
	case first && len(news) == 0:
		log.Info("No owner of rules is found yet; an owner that appears later is guarded if --protect names it", "protect", d.cfg.Protect)
	case first:
		log.Info("Guarding the rules of these owners", "protect", d.cfg.Protect, "owners", api.OwnersText(news, strconv.Itoa))
	case len(news) > 0:
		log.Info("Guarding the rules of another owner", "protect", d.cfg.Protect, "owners", api.OwnersText(news, strconv.Itoa))
	}
	if first && len(g.idle) > 0 {
		severity.Notices(log).Info("Words of --protect name nothing that canaryd guards", "words", g.idle,
			"advice", "check their spelling; matching rules that appear later are guarded")
	}
	if len(sinceLastRun) > 0 {
		fields := []any{"owners", api.OwnersText(sinceLastRun, strconv.Itoa)}
		if words := leaveOut(d.cfg.Protect, sinceLastRun); words != "" {
			fields = append(fields, "leaveOut", "--protect="+words)
		}
		severity.Notices(log).Info("Guarding the rules of owners that the last run did not guard", fields...)
	}
}

// idleWords returns the words of --protect that name chains, rules or native tables, and nothing
// that is guarded now. A mistyped word is among them. Presets are not: NewSelector refuses unknown
// ones, and a fleet has the same value on nodes of all kinds.
func (d *Daemon) idleWords(st *state) (idle []string) {
	for _, w := range d.words {
		named := anyOf(st.native.tables, func(t *nativeTable) bool { return t.want != nil && w.ProtectsTable(t.want.ID) })
		for id, s := range st.want() {
			named = named || slices.ContainsFunc(s.Chains, func(c rules.Chain) bool { return w.Protects(c.Name) }) ||
				slices.ContainsFunc(s.Jumps, func(h rules.Jump) bool {
					return w.Protects(h.Into()) || h.Named && w.MatchesPreset(id.Name, h.Chain, h.Rule)
				})
		}
		if !named {
			idle = append(idle, w.Word)
		}
	}
	return idle
}

// namesAuto returns the words of a value of --protect, and whether auto is among them. Words
// that cannot be parsed count as none.
func namesAuto(value string) ([]string, bool) {
	words, err := protect.Split(value)
	if err != nil {
		return nil, false
	}
	s, err := protect.NewSelector(words)
	return words, err == nil && s.Auto()
}

// leaveOut returns a value of --protect with words that take these owners out of auto, for the
// log line about new owners. It returns "" if the value has no auto, or other words name these
// owners.
func leaveOut(value string, list []api.GuardedOwner) string {
	words, auto := namesAuto(value)
	if !auto {
		return ""
	}
	for _, o := range list {
		if word := "-" + o.Word; o.Word != "" && !slices.Contains(words, word) {
			words = append(words, word)
		}
	}
	value = protect.Join(words)
	if _, auto := namesAuto(value); !auto {
		return ""
	}
	return value
}

// recallGuards notes the owners that the last run guarded, before any read. findOwners then
// logs the owners that are new.
func recallGuards(st *state) {
	found := ownersIn(st)
	if len(found) == 0 && st.generation.captured.IsZero() {
		return // the last run's owners are not known
	}
	st.guards.before = map[string]bool{}
	for _, o := range found {
		st.guards.before[o.Owner] = true
	}
}

// ownersIn returns the owners of the rules and native tables that ought to be in force, with
// their numbers, in the order of owners.All.
func ownersIn(st *state) []api.GuardedOwner {
	found := map[string]*api.GuardedOwner{}
	of := func(o owners.Owner) *api.GuardedOwner {
		if found[o.Name] == nil {
			found[o.Name] = &api.GuardedOwner{Owner: o.Name, Word: o.Preset}
		}
		return found[o.Name]
	}
	for id, s := range st.want() {
		for _, c := range s.Chains {
			if o, known := owners.OfChain(c.Name); known && !s.IsLedTo(c.Name) {
				of(o).Chains++
			}
		}
		for _, h := range s.Jumps {
			if !h.Named || h.LeftOut() {
				continue
			}
			words, err := h.Rule.Words()
			if o, known := owners.OfRule(id.Name, h.Chain, words); err == nil && known {
				of(o).Rules++
			}
		}
	}
	for id := range st.native.tables {
		if o, known := owners.OfTable(id); known {
			g := of(o)
			g.Tables = append(g.Tables, id.NFT())
		}
	}
	var list []api.GuardedOwner
	for _, o := range owners.All() {
		if g := found[o.Name]; g != nil {
			slices.Sort(g.Tables)
			list = append(list, *g)
		}
	}
	return list
}
