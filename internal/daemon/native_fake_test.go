package daemon

import (
	"bytes"
	"cmp"
	"errors"
	"maps"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

var (
	proxyTable  = tableid.IPv4.Table("kube-proxy")
	dockerTable = tableid.IPv4.Table("docker-bridges")
)

// A fakeNative is a set of native tables in memory. It reports commits as the kernel does.
type fakeNative struct {
	neighbour watch.Neighbour // next to the committing process
	unread    bool            // the committing process, or its parent, ends before it can be read
	line      string          // that process's command line; empty: it was not read
	origin    watch.Origin    // of the committing process
	late      time.Duration   // delay from a commit to the note of its process
	pid       uint32          // of the committing process; 0: 4242

	mu                 sync.Mutex
	genid              uint32
	handle             uint64
	tables             map[tableid.TableID]*native.Table
	witness            map[tableid.Family]string
	taken              bool // another process has a table with the witness's name
	unheard            []native.Commit
	missed, dropping   bool
	heals              int   // transactions that restore tables
	stale              int   // writes that another process precedes; -1: all
	broken             error // for all questions
	questioned         int   // number of questions that could have failed
	refuses            map[tableid.TableID]bool
	refusesRule        string   // the kernel refuses rules of that text; "": none
	alone              bool     // a transaction with several tables is refused
	between            func()   // runs right after a replay, once
	after              func()   // runs right after a read, once
	lacking            []string // missing devices: base chains are restored with other attributes
	owners             map[tableid.TableID]uint32
	onCommit           func(nft.Commit)
	captures           int
	follows, refreshes int
	probes             int
	takes              time.Duration // duration of a read
	brokenReads        error         // for reads of tables
	brokenHears        error         // for reads of notifications
	brokenProbes       error
	brokenWrites       error // for writes with repairs
	suspect            func(native.Commit) bool
	// kernel has the genid; nil: the fake has its own.
	kernel *iptablestest.Fake
	// riding has the arguments of the last Append, and rode counts the writes of riders.
	riding     []native.Repair
	planted    map[tableid.Family]string
	rode       int
	unrideable bool                         // riders are refused
	committed  func()                       // runs right after a write with a rider, once
	boarding   func()                       // runs between a read and the write that depends on it, once
	asks       int                          // number of calls of wake
	budget     *nft.Budget[tableid.TableID] // nil: no limit
	weights    map[tableid.TableID]nft.Weight
	read       map[tableid.TableID]int // how often each table was read
	open       bool

	takeDrill      func() // runs before a drill takes its tables, once
	brokenTake     error  // for these takings
	brokenRemovals error  // for the removals of drills' tables
	foreignDrill   bool   // another process has tables of that name
}

// wake implements NativeConfig.Wake.
func (k *fakeNative) wake(wanted func(nft.Table) bool) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asks++
	k.open = k.open || wanted == nil
	for id := range k.tables {
		k.open = k.open || wanted(nft.Table{Family: id.Family, Name: id.Name})
	}
	if k.open {
		k.unheard = nil // it receives notifications from now on
	}
	return k.open && k.broken == nil, k.fault()
}

func newFakeNative(tables ...*native.Table) *fakeNative {
	k := &fakeNative{genid: 7, tables: map[tableid.TableID]*native.Table{}, witness: map[tableid.Family]string{},
		refuses: map[tableid.TableID]bool{}, owners: map[tableid.TableID]uint32{}, onCommit: func(nft.Commit) {}}
	for _, t := range tables {
		k.put(t)
	}
	return k
}

func ruleOf(text string) native.Rule {
	return native.Rule{Attrs: nft.AppendAttr(nil, unix.NFTA_RULE_USERDATA, text, 0)}
}

// tableOf makes a table with a base chain and another chain to which that leads.
func tableOf(id tableid.TableID, rules ...string) *native.Table {
	t := &native.Table{ID: id, Chains: []native.Chain{
		{Name: "prerouting", Base: true, Rules: []native.Rule{ruleOf("jump services")}}, {Name: "services"}}}
	for _, r := range rules {
		t.Chains[1].Rules = append(t.Chains[1].Rules, ruleOf(r))
	}
	return t
}

// put puts a table into the kernel, as a creation does.
func (k *fakeNative) put(t *native.Table) {
	next := *t
	k.handle++
	next.Handle = k.handle
	k.tables[t.ID] = &next
}

func (k *fakeNative) emptied(id tableid.TableID) {
	next := *k.tables[id]
	next.Chains = slices.Clone(next.Chains)
	for i := range next.Chains {
		next.Chains[i].Rules = nil
	}
	k.tables[id] = &next
}

// commit changes the tables in one transaction.
func (k *fakeNative) commit(own bool, do func(deed func(tableid.TableID) *native.Deed, c *native.Commit)) {
	k.mu.Lock()
	if k.genid++; k.kernel != nil {
		k.genid = k.kernel.Step()
	}
	c := native.Commit{Commit: nft.Commit{Genid: k.genid, PID: cmp.Or(k.pid, 4242), Comm: "nft", Own: own},
		Deeds: map[tableid.TableID]*native.Deed{}, WitnessLost: map[tableid.Family]bool{}}
	before := maps.Clone(k.tables)
	do(func(id tableid.TableID) *native.Deed {
		if c.Deeds[id] == nil {
			c.Deeds[id] = &native.Deed{Genid: c.Genid}
		}
		return c.Deeds[id]
	}, &c)
	for id, d := range c.Deeds {
		d.WitnessLost = c.WitnessLost[id.Family]
	}
	if c.Before = map[tableid.TableID]native.Before{}; k.suspect != nil && k.suspect(c) {
		for id := range c.Deeds {
			if t := before[id]; t != nil {
				c.Before[id] = native.Before{Table: t, Digest: t.Digest(), Genid: c.Genid - 1, LeftAt: time.Now()}
			}
		}
	}
	if k.dropping {
		k.missed, k.unheard = true, nil
	} else {
		k.unheard = append(k.unheard, c)
	}
	heard := k.onCommit
	k.mu.Unlock()
	heard(c.Commit)
}

func (k *fakeNative) flushRuleset() {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, c *native.Commit) {
		for id := range k.tables {
			if k.owners[id] == 0 {
				*deed(id) = native.Deed{Genid: c.Genid, Deleted: true}
				delete(k.tables, id)
			}
		}
		for family := range k.witness {
			c.WitnessLost[family] = true
		}
		clear(k.witness)
	})
}

// reload runs "nft -f" with a file of "flush ruleset" and a table.
func (k *fakeNative) reload(t *native.Table) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, c *native.Commit) {
		for id := range k.tables {
			*deed(id) = native.Deed{Genid: c.Genid, Deleted: true}
			delete(k.tables, id)
		}
		for family := range k.witness {
			c.WitnessLost[family] = true
		}
		clear(k.witness)
		k.put(t)
		deed(t.ID).Made = k.handle
	})
}

func (k *fakeNative) deleteTable(id tableid.TableID) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		deed(id).Deleted = true
		delete(k.tables, id)
	})
}

func (k *fakeNative) flushTable(id tableid.TableID) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		deed(id).Rules = map[string]int{}
		for _, c := range k.tables[id].Chains {
			if n := len(c.Rules); n > 0 {
				deed(id).Rules[c.Name] = n
			}
		}
		k.emptied(id)
	})
}

// removeRule deletes a rule and writes nothing, as an owner may.
func (k *fakeNative) removeRule(id tableid.TableID) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *k.tables[id]
		next.Chains = slices.Clone(next.Chains)
		last := &next.Chains[len(next.Chains)-1]
		last.Rules = last.Rules[:len(last.Rules)-1]
		k.tables[id] = &next
		deed(id).Rules = map[string]int{last.Name: 1}
	})
}

// addRule appends a rule to the last chain, as an owner does.
func (k *fakeNative) addRule(id tableid.TableID, text string) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *k.tables[id]
		next.Chains = slices.Clone(next.Chains)
		last := &next.Chains[len(next.Chains)-1]
		last.Rules = append(slices.Clone(last.Rules), ruleOf(text))
		k.tables[id] = &next
		deed(id).New = 1
	})
}

// removeNamed deletes chains with their rules, rules of a chain and elements of a set by name,
// in one commit.
func (k *fakeNative) removeNamed(id tableid.TableID, deletes func(chain string) bool, rules, elements map[string]int) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		d, next := deed(id), *k.tables[id]
		d.Rules, d.Elements, d.Chains = map[string]int{}, elements, map[string]int{}
		maps.Copy(d.Rules, rules)
		next.Chains = slices.DeleteFunc(slices.Clone(next.Chains), func(c native.Chain) bool {
			if deletes == nil || !deletes(c.Name) {
				return false
			}
			d.Rules[c.Name], d.Chains[c.Name], d.Lost = len(c.Rules), 1, d.Lost+1
			return true
		})
		for i := range next.Chains {
			c := &next.Chains[i]
			c.Rules = c.Rules[rules[c.Name]:]
		}
		next.Sets = slices.Clone(next.Sets)
		for i := range next.Sets {
			s := &next.Sets[i]
			s.Elements = s.Elements[elements[s.Name]:]
		}
		k.tables[id] = &next
	})
}

// flushChain deletes the rules of a chain, and flushSet the elements of a set.
func (k *fakeNative) flushChain(id tableid.TableID, name string) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *k.tables[id]
		next.Chains = slices.Clone(next.Chains)
		c := &next.Chains[slices.IndexFunc(next.Chains, func(c native.Chain) bool { return c.Name == name })]
		if n := len(c.Rules); n > 0 {
			deed(id).Rules = map[string]int{name: n}
		}
		c.Rules = nil
		k.tables[id] = &next
	})
}

func (k *fakeNative) flushSet(id tableid.TableID, name string) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *k.tables[id]
		next.Sets = slices.Clone(next.Sets)
		s := &next.Sets[slices.IndexFunc(next.Sets, func(s native.Set) bool { return s.Name == name })]
		if n := len(s.Elements); n > 0 {
			deed(id).Elements = map[string]int{name: n}
		}
		s.Elements = nil
		k.tables[id] = &next
	})
}

// again makes a table again as its owner does: it deletes the present one, and creates it at
// once.
func (k *fakeNative) again(t *native.Table) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		deed(t.ID).Deleted = k.tables[t.ID] != nil
		k.put(t)
		deed(t.ID).Made = k.handle
	})
}

// sync writes other rules into an existing table, as its owner does.
func (k *fakeNative) sync(t *native.Table) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *t
		next.Handle = k.tables[t.ID].Handle
		k.tables[t.ID] = &next
		deed(t.ID).New, deed(t.ID).Rules = 3, map[string]int{"services": 1}
	})
}

// fullSync writes all rules of an existing table again, as kube-proxy does in a full sync.
func (k *fakeNative) fullSync(id tableid.TableID) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		deed(id).New, deed(id).Rules = 4, map[string]int{"prerouting": 1, "services": 1}
	})
}

// RequestFullSync implements NativeKernel: it adds a chain, and an element of the map of services
// that leads there.
func (k *fakeNative) RequestFullSync(genid uint32, t *native.Table) error {
	if now, err := k.Genid(); err != nil || now != genid {
		return cmp.Or(err, nft.ErrStale)
	}
	if k.standing(t.ID) == nil {
		return &nft.RefusedError{Errno: syscall.ENOENT, What: "table " + t.ID.String()}
	}
	k.commit(true, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *k.tables[t.ID]
		if next.Chain(native.SyncChain) == nil {
			next.Chains = append(slices.Clone(next.Chains), native.Chain{Name: native.SyncChain})
		}
		next.Sets = slices.Clone(next.Sets)
		for i := range next.Sets {
			asked := func(e native.Element) bool { return targetOf(e) == native.SyncChain }
			if s := &next.Sets[i]; s.Name == owners.ProxyServices && !slices.ContainsFunc(s.Elements, asked) {
				s.Elements = append(slices.Clone(s.Elements), elementOf(0, native.SyncChain))
			}
		}
		k.tables[t.ID] = &next
		deed(t.ID).New = 1
	})
	return nil
}

// setPolicy sets the policy of the first chain, which is a base chain.
func (k *fakeNative) setPolicy(id tableid.TableID, accepts byte) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := withPolicy(k.tables[id], accepts)
		k.tables[id] = next
		if deed(id).New = 1; accepts == 0 {
			deed(id).Closed = map[string]int{next.Chains[0].Name: 1}
		}
	})
}

// withPolicy returns a table whose first chain has that policy: 0 is DROP, 1 ACCEPT.
func withPolicy(t *native.Table, accepts byte) *native.Table {
	next := *t
	next.Chains = slices.Clone(next.Chains)
	next.Chains[0].Attrs = nft.AppendAttr(nil, unix.NFTA_CHAIN_POLICY, []byte{0, 0, 0, accepts}, 0)
	return &next
}

// dormant sets or clears the table's flag.
func (k *fakeNative) dormant(id tableid.TableID, is bool) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *k.tables[id]
		if next.Flags, next.Attrs = 0, nil; is {
			next.Flags = 1
			next.Attrs = nft.AppendAttr(nil, unix.NFTA_TABLE_FLAGS, []byte{0, 0, 0, 1}, 0)
		}
		k.tables[id] = &next
		deed(id).Made = next.Handle
	})
}

// fault returns the error for a question, or nil; k.mu must be held.
func (k *fakeNative) fault() error {
	k.questioned++
	return k.broken
}

func (k *fakeNative) questions() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.questioned
}

// breakDown makes all questions fail, until it is called with nil.
func (k *fakeNative) breakDown(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.broken = err
}

// A nativeCount is a summary of the calls of a fakeNative.
type nativeCount struct {
	heals, captures int
	witness         string // IPv4's
}

func (k *fakeNative) count() nativeCount {
	k.mu.Lock()
	defer k.mu.Unlock()
	return nativeCount{k.heals, k.captures, k.witness[proxyTable.Family]}
}

// with runs do while the daemon makes no call.
func (k *fakeNative) with(do func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	do()
}

// miss makes the next Hear report dropped notifications.
func (k *fakeNative) miss() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.missed, k.unheard = true, nil
}

// missing drops the notifications of all commits during do. canaryd gets the hints anyway.
func (k *fakeNative) missing(do func()) {
	k.with(func() { k.dropping = true })
	do()
	k.with(func() { k.dropping = false })
}

func (k *fakeNative) standing(id tableid.TableID) *native.Table {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.tables[id]
}

func (k *fakeNative) Genid() (uint32, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now(), k.fault()
}

// now returns the genid; k.mu must be held.
func (k *fakeNative) now() uint32 {
	if k.kernel != nil {
		return k.kernel.Genid()
	}
	return k.genid
}

func (k *fakeNative) Hear(uint32) ([]native.Commit, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	commits, err := k.unheard, errors.Join(k.fault(), k.brokenHears)
	missed := k.missed || err != nil
	k.unheard, k.missed = nil, false
	return commits, missed, err
}

func (k *fakeNative) Suspect(f func(native.Commit) bool) { k.suspect = f }

func (k *fakeNative) Refresh(time.Duration) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refreshes++
	return 1, k.fault()
}

// Probe implements NativeKernel: it shows the whole table.
func (k *fakeNative) Probe(id tableid.TableID, _ []native.Change) (native.Probe, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.probes++
	g := native.Probe{Genid: k.now(), Table: k.tables[id], Used: map[string]bool{"services": true}}
	if after := k.after; after != nil {
		k.after = nil
		k.mu.Unlock()
		after()
		k.mu.Lock()
	}
	return g, errors.Join(k.fault(), k.brokenReads, k.brokenProbes)
}

func (k *fakeNative) Follow(wanted func(nft.Table) bool) (*native.Ruleset, error) {
	k.mu.Lock()
	k.follows++
	k.captures-- // Follow reads nothing
	k.mu.Unlock()
	return k.Capture(wanted)
}

func (k *fakeNative) Capture(wanted func(nft.Table) bool) (*native.Ruleset, error) {
	var takes time.Duration
	k.with(func() { takes = k.takes })
	time.Sleep(takes)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.captures++
	r := &native.Ruleset{Genid: k.now(), At: time.Now(), Tables: map[tableid.TableID]*native.Table{}, Fleeting: map[tableid.TableID]bool{}}
	for id, t := range k.tables {
		if wanted(nft.Table{Family: id.Family, Name: id.Name, Owner: k.owners[id]}) {
			r.Tables[id], r.Fleeting[id] = t, t.Fleeting()
		}
	}
	k.leaveTablesOut(r)
	if after := k.after; after != nil {
		k.after = nil
		k.mu.Unlock()
		after()
		k.mu.Lock()
	}
	return r, errors.Join(k.fault(), k.brokenReads)
}

// limit sets a limit of the size of all tables, where an element is as large as a rule.
func (k *fakeNative) limit(most int) {
	k.weights, k.read = map[tableid.TableID]nft.Weight{}, map[tableid.TableID]int{}
	k.budget = nft.NewBudget(most, func(p, q nft.Weighed[tableid.TableID]) int {
		return cmp.Or(cmp.Compare(q.Units(), p.Units()), p.Part.Compare(q.Part))
	})
}

// leaveTablesOut takes the tables that are too large out of a read; k.mu must be held.
func (k *fakeNative) leaveTablesOut(r *native.Ruleset) {
	if k.budget == nil {
		return
	}
	maps.DeleteFunc(k.weights, func(id tableid.TableID, _ nft.Weight) bool { return k.tables[id] == nil })
	for id, t := range r.Tables {
		_, rules, elements := t.Counts()
		k.weights[id] = nft.Weight{Rules: rules + elements}
		k.read[id]++
	}
	r.LeftOut, _ = k.budget.Choose(k.weights)
	maps.DeleteFunc(r.Tables, func(id tableid.TableID, _ *native.Table) bool { _, left := r.LeftOut[id]; return left })
}

func (k *fakeNative) Witness(family tableid.Family) (native.Witness, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.witness[family] == "" {
		return native.Witness{Taken: k.taken}, k.fault()
	}
	return native.NewWitness(k.witness[family], k.taken), k.fault()
}

func (k *fakeNative) Write(genid uint32, repairs []native.Repair, witnesses map[tableid.Family]string) ([]string, error) {
	k.mu.Lock()
	for i := range repairs {
		k.leaveRefused(&repairs[i])
	}
	stale := genid != k.now() || k.stale != 0
	if k.stale > 0 && len(repairs) > 0 {
		k.stale--
	}
	var refused error
	if len(repairs) > 0 {
		refused = k.brokenWrites
	}
	if k.alone && len(repairs) > 1 {
		refused = &nft.RefusedError{Errno: syscall.ENOMEM}
	}
	for _, r := range repairs {
		id := r.Want.ID
		if k.refuses[id] || r.Remedy == native.ByCreate && k.tables[id] != nil {
			refused = &nft.RefusedError{Errno: syscall.EEXIST, What: "table " + id.String()}
		}
	}
	broken, moved := k.fault(), genid != k.now()
	k.mu.Unlock()
	switch {
	case broken != nil:
		return nil, broken
	case refused != nil:
		return nil, refused
	case stale && len(repairs) > 0 || moved:
		return nil, nft.ErrStale
	case len(repairs) == 1 && repairs[0].Remedy == native.ByAdmission && len(native.Diff(repairs[0].Now, repairs[0].Written())) == 0:
		return nil, nil // nothing to write
	}
	k.write(repairs, witnesses)
	k.mu.Lock()
	between := k.between
	if len(repairs) == 0 || between == nil {
		between = func() {}
	} else {
		k.between = nil
	}
	k.mu.Unlock()
	between()
	return k.lacking, nil
}

func (k *fakeNative) Append(_ *nft.Batch, repairs []native.Repair, witnesses map[tableid.Family]string) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.riding, k.planted = repairs, witnesses
	if boarding := k.boarding; boarding != nil {
		k.boarding = nil
		k.mu.Unlock()
		boarding()
		k.mu.Lock()
	}
	return nil, k.fault()
}

// Takes implements iptablestest.Passenger.
func (k *fakeNative) Takes() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.riding {
		if k.unrideable || k.refuses[r.Want.ID] || k.tables[r.Want.ID] != nil {
			return &nft.RefusedError{Errno: syscall.EEXIST, What: "table " + r.Want.ID.String()}
		}
	}
	return nil
}

// Commit implements iptablestest.Passenger.
func (k *fakeNative) Commit() {
	k.write(k.riding, k.planted)
	var committed func()
	k.with(func() {
		k.rode++
		committed, k.committed = k.committed, nil
	})
	if committed != nil {
		committed()
	}
}

// write commits a transaction of the daemon.
func (k *fakeNative) write(repairs []native.Repair, witnesses map[tableid.Family]string) {
	k.commit(true, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		maps.Copy(k.witness, witnesses)
		for _, r := range repairs {
			deed(r.Want.ID).New++
			if r.Remedy == native.ByAdmission {
				next := *r.Written()
				k.tables[r.Want.ID] = &next
				continue
			}
			if r.Remedy == native.ByRefill || r.Remedy == native.ByMerge {
				k.tables[r.Want.ID] = refilled(r)
				continue
			}
			k.put(r.Written())
			k.leaveOut(r.Want.ID)
		}
		if len(repairs) > 0 {
			k.heals++
		}
	})
}

// leaveRefused makes a repair leave out the refused rules.
func (k *fakeNative) leaveRefused(r *native.Repair) {
	for i, c := range r.Want.Chains {
		for j, rule := range c.Rules {
			if k.refusesRule != "" && bytes.Contains(rule.Attrs, []byte(k.refusesRule)) {
				r.Leave(native.Spot{Kind: nft.Rules, At: i, In: j}, "no such file or directory")
			}
		}
	}
}

// leaveOut removes from a table's first chain the devices that the node lacks.
func (k *fakeNative) leaveOut(id tableid.TableID) {
	if t := k.tables[id]; len(k.lacking) > 0 {
		t.Chains = slices.Clone(t.Chains)
		t.Chains[0].Attrs = nft.AppendAttr(nil, unix.NFTA_CHAIN_POLICY, []byte{0, 0, 0, 1}, 0)
	}
}

var errNativeBroken = errors.New("the kernel does not answer")

// TakeDrill implements NativeKernel. The fake's canaryd is process 4242, too.
func (k *fakeNative) TakeDrill(genid uint32, tables []*native.Table, kind native.Verdict) (time.Time, error) {
	if boarding := k.takeDrill; boarding != nil {
		k.takeDrill = nil
		boarding()
	}
	now, err := k.Genid()
	if err = errors.Join(err, k.brokenTake); err != nil || now != genid {
		return time.Time{}, cmp.Or(err, nft.ErrStale)
	}
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		for _, t := range tables {
			d := deed(t.ID)
			switch kind {
			case native.Emptied:
				d.Rules = map[string]int{"canary": 1}
				k.emptied(t.ID)
			case native.Replaced:
				old := *t
				old.Sets = nil
				k.put(&old)
				d.Deleted, d.Made = true, k.handle
			default:
				d.Deleted = true
				delete(k.tables, t.ID)
			}
		}
	})
	return time.Now(), nil
}

// removeDrills implements NativeConfig.RemoveDrills.
func (k *fakeNative) removeDrills() error {
	k.mu.Lock()
	drills := 0
	for id := range k.tables {
		if native.IsDrill(id) && !k.foreignDrill {
			drills++
		}
	}
	err := errors.Join(k.broken, k.brokenRemovals)
	k.mu.Unlock()
	if err != nil || drills == 0 {
		return err
	}
	k.commit(true, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		for id := range k.tables {
			if native.IsDrill(id) {
				deed(id).Deleted = true
				delete(k.tables, id)
			}
		}
	})
	return nil
}

// drillTables counts the tables of drills.
func (k *fakeNative) drillTables() (n int) {
	k.with(func() {
		for id := range k.tables {
			if native.IsDrill(id) {
				n++
			}
		}
	})
	return n
}

// wantNative fails unless the kernel has a table with the content of want.
func (k *fakeNative) wantNative(t *testing.T, want *native.Table) {
	t.Helper()
	now := k.standing(want.ID)
	if now == nil {
		t.Errorf("%s is gone", want.ID.NFT())
		return
	}
	if changes := native.Diff(want, now); len(changes) > 0 {
		t.Errorf("%s is not as it ought to be: %v", want.ID.NFT(), changes)
	}
}
