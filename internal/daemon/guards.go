package daemon

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// --protect=auto names all owners that canaryd knows, whether or not they are on the node. The
// generation and the native tables then say which are: an owner is found by its guarded rules. It
// stays found after a flush, and a later owner is found by its first rules.

const (
	// findEvery bounds how often owners are looked for in a generation that changes all the time.
	// At 5,000 services that takes 3 ms.
	findEvery = time.Second
	// unguardedEvery bounds how often unguarded chains are counted.
	unguardedEvery = 30 * time.Second
)

// guards is which owners have rules that are guarded, and which chains and tables are unguarded.
type guards struct {
	edition int                      // of the generation in which owners were looked for last
	native  map[tableid.TableID]bool // the native tables of then
	at      time.Time
	cost    time.Duration
	found   []api.GuardedOwner
	said    map[string]bool // owners that the log has named; nil: it has named none yet
	before  map[string]bool // owners that the last run guarded; nil: that is not known

	countedAt time.Time
	counted   uint64   // readSoFar of then
	tables    []string // native tables that are not guarded
}

// ownersAt returns when owners are to be looked for.
func (d *Daemon) ownersAt(st *state) time.Time {
	g := &st.guards
	switch {
	case g.said == nil:
		return d.made
	case g.edition != st.generation.edition || !sameTables(g.native, st.native.tables):
		return g.at.Add(max(findEvery, compareShare*g.cost))
	}
	return time.Time{}
}

// sameTables reports whether these are the guarded native tables: one may go as another comes.
func sameTables(known map[tableid.TableID]bool, now map[tableid.TableID]*nativeTable) bool {
	for id := range now {
		if !known[id] {
			return false
		}
	}
	return len(known) == len(now)
}

// mayFindOwners reports whether every table was read, so that a list of owners is complete.
func (d *Daemon) mayFindOwners(st *state) bool {
	read := !st.anyFamily(func(fs *familyState) bool { return fs.examined.at.IsZero() })
	return read && st.allPlanted() && (!d.guardsNative() || st.native.begun)
}

// findOwners looks for owners of guarded rules. The log names each once.
func (d *Daemon) findOwners(ctx context.Context, st *state) {
	g := &st.guards
	start := time.Now()
	g.found = ownersIn(st)
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
	if len(sinceLastRun) > 0 {
		fields := []any{"owners", api.OwnersText(sinceLastRun, strconv.Itoa)}
		if words := leaveOut(d.cfg.Protect, sinceLastRun); words != "" {
			fields = append(fields, "leaveOut", "--protect="+words)
		}
		severity.Notices(log).Info("Rules are guarded of owners that the last run did not guard", fields...)
	}
}

// namesAuto returns the words of a value of --protect, and whether auto is among them.
func namesAuto(value string) ([]string, bool) {
	words, err := protect.Split(value)
	if err != nil {
		return nil, false
	}
	s, err := protect.NewSelector(words)
	return words, err == nil && s.Auto()
}

// leaveOut returns a value of --protect with words that take these owners out of auto; "" if it has
// no auto, or other words name these owners.
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

// recallGuards takes down which owners the last run guarded, before anything is read.
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

// ownersIn returns the owners of the rules that ought to be in force, in the table's order.
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

// unguardedAt returns when unguarded chains are counted: when reads have shown something new.
func (d *Daemon) unguardedAt(st *state) time.Time {
	switch g := &st.guards; {
	case g.countedAt.IsZero():
		return d.made
	case g.counted != st.readSoFar():
		return g.countedAt.Add(unguardedEvery)
	}
	return time.Time{}
}

// readSoFar returns a number that changes with the last read of any family.
func (st *state) readSoFar() (sum uint64) {
	for _, fs := range st.inOrder() {
		sum = 31*sum + fs.examined.digest
	}
	return sum
}

// mayCountUnguarded reports whether every table was read and nothing is lost.
func (d *Daemon) mayCountUnguarded(st *state) bool { return st.loss == nil && d.mayFindOwners(st) }

// countUnguarded counts the chains with rules, and the native tables, that are not guarded, as the
// last reads showed them.
func (d *Daemon) countUnguarded(ctx context.Context, st *state) {
	g := &st.guards
	g.countedAt, g.counted = time.Now(), st.readSoFar()
	protects := d.protection(st).Chain
	for f, fs := range st.inOrder() {
		fs.strange = strange{}
		for _, t := range protect.Tables() {
			table, section := fs.tables[t].standing.table, st.want()[f.Table(t)]
			if fs.tables[t].unmarked(t) {
				table = fs.unguarded[t].before
			}
			fs.strange.count(table, func(chain string) bool { return protects(chain) || section.IsLedTo(chain) }, d.cfg.Canary)
		}
	}
	if d.cfg.NativeTables == nil {
		return
	}
	tables, err := d.cfg.NativeTables(ctx)
	if err != nil {
		klog.FromContext(ctx).V(1).Info("Which native tables are not guarded is not known", "reason", err)
		return
	}
	g.tables = nil
	for _, id := range tables {
		if _, name, _ := strings.Cut(id, " "); owners.ManagerOfTable(name) == "" {
			g.tables = append(g.tables, id)
		}
	}
}

// count adds the chains of a table that are not guarded, and are no firewall manager's.
func (s *strange) count(table *rules.Table, guarded func(string) bool, canaryChain string) {
	if table == nil {
		return
	}
	for _, c := range table.Chains {
		switch {
		case len(c.Rules) == 0, rules.Builtin(table.Name, c.Name), c.Name == canaryChain, strings.HasSuffix(c.Name, "-CANARY"):
			continue
		case guarded(c.Name), owners.ManagerOf(c.Name) != "":
			continue
		}
		s.chains++
		if len(s.names) < api.UnguardedShown {
			name := strings.Clone(c.Name)
			if o, known := owners.OfChain(c.Name); known {
				name += " (" + o.Name + ")"
			}
			s.names = append(s.names, name)
		}
	}
}

// strange counts one family's unguarded chains.
type strange struct {
	chains int
	names  []string // some of them
}

// unguardedNow returns the unguarded chains and tables for a Status; nil if there are none.
func (st *state) unguardedNow() *api.Unguarded {
	u := api.Unguarded{Tables: len(st.guards.tables)}
	add := func(name string) {
		if len(u.Names) < api.UnguardedShown && !slices.Contains(u.Names, name) {
			u.Names = append(u.Names, name)
		}
	}
	for _, fs := range st.inOrder() {
		u.Chains += fs.strange.chains
		for _, name := range fs.strange.names {
			add(name)
		}
	}
	for _, name := range st.guards.tables {
		add("table " + name)
	}
	if st.removed || u.Chains+u.Tables == 0 {
		return nil
	}
	return &u
}
