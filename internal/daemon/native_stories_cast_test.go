package daemon

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// errRefused: the kernel refuses a transaction, because it names a part that is missing or in use.
var errRefused = errors.New("the kernel refuses it")

// A nativeEdit is a transaction of an owner on its table. It fails as a whole, as in the kernel.
type nativeEdit struct {
	id     tableid.TableID
	was    *native.Table
	now    *native.Table // nil: there is none
	deed   native.Deed
	made   bool // the table is new
	failed error
}

func (k *fakeNative) edit(id tableid.TableID) *nativeEdit {
	e := &nativeEdit{id: id, was: k.standing(id), deed: native.Deed{Rules: map[string]int{}, Elements: map[string]int{}, Chains: map[string]int{}}}
	if e.was != nil {
		next := *e.was
		next.Chains, next.Sets = slices.Clone(next.Chains), slices.Clone(next.Sets)
		e.now = &next
	}
	return e
}

func (e *nativeEdit) fail(format string, args ...any) {
	if e.failed == nil {
		e.failed = fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), errRefused)
	}
}

// table declares the table, and remove deletes it.
func (e *nativeEdit) table() {
	if e.now == nil {
		e.now, e.made = &native.Table{ID: e.id}, true
	}
}

func (e *nativeEdit) remove() {
	if e.now == nil {
		e.fail("no table")
		return
	}
	e.now, e.deed = nil, native.Deed{Deleted: true}
}

// write declares a chain, flushes it, and writes its rules.
func (e *nativeEdit) write(c native.Chain) {
	if e.now == nil {
		e.fail("no table for chain %s", c.Name)
		return
	}
	now := e.now.Chain(c.Name)
	if now == nil {
		e.now.Chains = append(e.now.Chains, native.Chain{Name: c.Name, Base: c.Base})
		e.deed.New++
		now = e.now.Chain(c.Name)
	}
	if n := len(now.Rules); n > 0 {
		e.deed.Rules[c.Name] += n
	}
	now.Rules = slices.Clone(c.Rules)
	e.deed.New += len(c.Rules)
}

// flush deletes a chain's rules.
func (e *nativeEdit) flush(name string) {
	if e.now == nil || e.now.Chain(name) == nil {
		e.fail("no chain %s", name)
		return
	}
	c := e.now.Chain(name)
	if n := len(c.Rules); n > 0 {
		e.deed.Rules[name] += n
	}
	c.Rules = nil
}

// drop deletes a chain, to which nothing may lead.
func (e *nativeEdit) drop(name string) {
	switch {
	case e.now == nil || e.now.Chain(name) == nil:
		e.fail("no chain %s", name)
		return
	case targetsIn(e.now)[name]:
		e.fail("chain %s is in use", name)
		return
	}
	e.flush(name)
	e.deed.Chains[name]++
	e.deed.Lost++
	e.now.Chains = slices.DeleteFunc(e.now.Chains, func(c native.Chain) bool { return c.Name == name })
}

func (e *nativeEdit) set(name string) *native.Set {
	if e.now != nil {
		for i := range e.now.Sets {
			if e.now.Sets[i].Name == name {
				return &e.now.Sets[i]
			}
		}
	}
	return nil
}

// declare declares a set.
func (e *nativeEdit) declare(name string) {
	if e.now == nil {
		e.fail("no table for set %s", name)
	} else if e.set(name) == nil {
		e.now.Sets = append(e.now.Sets, native.Set{Name: name})
		e.deed.New++
	}
}

// put adds an element, unless the set has it.
func (e *nativeEdit) put(name string, el native.Element) {
	s := e.set(name)
	switch {
	case s == nil:
		e.fail("no set %s", name)
	case e.now.Chain(targetOf(el)) == nil:
		e.fail("no chain %s", targetOf(el))
	case !slices.ContainsFunc(s.Elements, func(o native.Element) bool { return elementKey(o) == elementKey(el) }):
		s.Elements = append(slices.Clone(s.Elements), el)
		e.deed.New++
	}
}

// take deletes an element.
func (e *nativeEdit) take(name string, el native.Element) {
	same := func(o native.Element) bool { return elementKey(o) == elementKey(el) }
	s := e.set(name)
	if s == nil || !slices.ContainsFunc(s.Elements, same) {
		e.fail("no element in set %s", name)
		return
	}
	s.Elements = slices.DeleteFunc(slices.Clone(s.Elements), same)
	e.deed.Elements[name]++
}

// commit makes the edit, unless it fails or changes nothing.
func (e *nativeEdit) commit(k *fakeNative) error {
	took := len(e.deed.Rules)+len(e.deed.Elements)+e.deed.Lost > 0
	switch {
	case e.failed != nil:
		return e.failed
	case !e.made && !e.deed.Deleted && e.deed.New == 0 && !took:
		return nil
	}
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, c *native.Commit) {
		d := deed(e.id)
		genid := d.Genid
		*d = e.deed
		d.Genid = genid
		switch {
		case e.now == nil:
			delete(k.tables, e.id)
		case e.made:
			d.Deleted = e.deed.Deleted
			k.put(e.now)
			d.Made = k.handle
		default:
			k.tables[e.id] = e.now
		}
	})
	return nil
}

// A nativeKind is the way in which an owner writes its table.
type nativeKind string

const (
	proxies nativeKind = "proxy"   // by differences; after an error it writes everything
	dockers nativeKind = "docker"  // changes once, and remakes its table after an error
	remakes nativeKind = "remaker" // deletes and makes its table in each transaction
	leavers nativeKind = "leaver"  // as docker, and deletes its table for good
)

// A nativeOwner is the program that writes one table.
type nativeOwner struct {
	kind nativeKind
	id   tableid.TableID
	comm string
	pid  uint32
	slot map[int]int // the services that it wants, with their versions
	done map[int]int // the services that its last successful transaction left
	gone bool        // it has removed its table
	// full: the next sync writes everything; listed: it has read the table for that, as read.
	full, listed bool
	read         *native.Table
	stale        map[string]bool // chains that its next sync deletes
	synced       bool            // nothing has changed since the last sync
	syncAt       time.Time       // of the next sync at the earliest
}

const services = "service-ips"

func (o *nativeOwner) chain(slot int) string { return fmt.Sprintf("service-%d/tcp", slot) }

// service returns the chain of a service, in its version.
func (o *nativeOwner) service(slot, version int) native.Chain {
	c := native.Chain{Name: o.chain(slot)}
	for i := range 1 + version%3 {
		c.Rules = append(c.Rules, ruleOf(fmt.Sprintf("dnat %d v%d #%d", slot, version, i)))
	}
	return c
}

// bases returns the chains that lead to the services.
func (o *nativeOwner) bases() []native.Chain {
	return []native.Chain{
		{Name: "services", Rules: []native.Rule{lookUp(services), ruleOf("return")}},
		{Name: "prerouting", Base: true, Rules: []native.Rule{jumpTo("services"), ruleOf("count")}},
		{Name: "postrouting", Base: true, Rules: []native.Rule{ruleOf("mark"), ruleOf("masquerade")}},
	}
}

func (o *nativeOwner) element(slot int) native.Element {
	return elementOf(uint32(slot+1), o.chain(slot))
}

// wanted returns the owner's table; nil: it wants none.
func (o *nativeOwner) wanted() *native.Table {
	if o.gone {
		return nil
	}
	t := &native.Table{ID: o.id, Chains: o.bases(), Sets: []native.Set{{Name: services}}}
	for _, slot := range slices.Sorted(maps.Keys(o.slot)) {
		t.Chains = append(t.Chains, o.service(slot, o.slot[slot]))
		t.Sets[0].Elements = append(t.Sets[0].Elements, o.element(slot))
	}
	return t
}

// change changes a service: another version, a new one, or one less.
func (o *nativeOwner) change(w *nativeStory) string {
	slot := w.rng.IntN(5)
	if _, has := o.slot[slot]; has && w.rng.IntN(3) == 0 && len(o.slot) > 1 {
		delete(o.slot, slot)
		return fmt.Sprintf("service %d is gone", slot)
	}
	w.version++
	o.slot[slot] = w.version
	return fmt.Sprintf("service %d has version %d", slot, w.version)
}

// act is the owner's next step.
func (o *nativeOwner) act(w *nativeStory) string {
	switch {
	case o.kind == proxies && !o.idle() && !time.Now().Before(o.syncAt):
		return o.sync(w)
	case o.kind == leavers && o.gone:
		o.gone = false
		o.change(w)
		return o.remake(w)
	case o.kind == leavers && w.rng.IntN(6) == 0:
		return o.leave(w)
	}
	said := o.change(w)
	switch o.kind {
	case remakes:
		said += ", " + o.remake(w)
	case proxies:
		o.synced = false
		said += ", not written yet"
	default:
		said += ", " + o.apply(w)
	}
	return said
}

// idle reports whether everything is written.
func (o *nativeOwner) idle() bool {
	return !o.full && len(o.stale) == 0 && maps.Equal(o.slot, o.done) && o.synced
}

// sync is a sync of kube-proxy: a partial one, or a full one in two steps.
func (o *nativeOwner) sync(w *nativeStory) string {
	if o.full && !o.listed {
		o.read, o.listed = w.k.standing(o.id), true
		return "lists its table for a full sync"
	}
	e := w.k.edit(o.id)
	wanted, said := o.wanted(), "partial sync"
	stale := map[string]bool{}
	strange := func(t *native.Table) {
		if t != nil {
			for _, c := range t.Chains {
				if strings.Contains(c.Name, "/") && wanted.Chain(c.Name) == nil && !o.stale[c.Name] {
					stale[c.Name] = true
				}
			}
		}
	}
	touched := map[string]string{}
	if o.full {
		said = "full sync"
		e.table()
		e.declare(services)
		for _, c := range wanted.Chains {
			e.write(c)
		}
		strange(o.read)
		if o.read != nil {
			for _, s := range o.read.Sets {
				for _, el := range s.Elements {
					if to := targetOf(el); wanted.Chain(to) == nil {
						e.take(services, el)
					}
				}
			}
		}
		for slot := range o.slot {
			e.put(services, o.element(slot))
		}
		touched = w.ledger.all(o.id, wanted)
		for name := range stale {
			e.flush(name)
			touched["chain "+name] = "{}"
		}
	} else {
		strange(e.was)
		o.difference(e, touched)
		for name := range o.stale {
			e.drop(name)
			touched["chain "+name] = absent
		}
		for slot := range o.done {
			if _, has := o.slot[slot]; !has {
				stale[o.chain(slot)] = true
			}
		}
	}
	o.listed, o.full = false, false
	err := w.ownerCommits(o, e, touched)
	if err != nil {
		o.full, o.synced = true, false
		return said + ": " + err.Error()
	}
	o.done, o.stale, o.synced, o.syncAt = maps.Clone(o.slot), stale, true, time.Now().Add(time.Second)
	return said
}

// difference writes the changes of services into an edit. touched gets the parts.
func (o *nativeOwner) difference(e *nativeEdit, touched map[string]string) {
	elements := false
	for _, slot := range slices.Sorted(maps.Keys(o.slot)) {
		was, had := o.done[slot]
		if had && was == o.slot[slot] {
			continue
		}
		c := o.service(slot, o.slot[slot])
		e.write(c)
		touched["chain "+c.Name] = chainText(&c)
		if !had {
			e.put(services, o.element(slot))
			elements = true
		}
	}
	for _, slot := range slices.Sorted(maps.Keys(o.done)) {
		if _, has := o.slot[slot]; !has {
			e.take(services, o.element(slot))
			e.flush(o.chain(slot))
			touched["chain "+o.chain(slot)] = "{}"
			elements = true
		}
	}
	if elements {
		touched["set "+services] = setText(&o.wanted().Sets[0])
	}
}

// apply writes a change as Docker does: it declares the table and the changed parts. After an
// error it makes the table again.
func (o *nativeOwner) apply(w *nativeStory) string {
	e, touched := w.k.edit(o.id), map[string]string{}
	e.table()
	e.declare(services)
	o.difference(e, touched)
	for slot := range o.done {
		if _, has := o.slot[slot]; !has && e.failed == nil {
			e.drop(o.chain(slot))
			touched["chain "+o.chain(slot)] = absent
		}
	}
	if err := w.ownerCommits(o, e, touched); err != nil {
		return "apply: " + err.Error() + ", " + o.remake(w)
	}
	o.done = maps.Clone(o.slot)
	return "applied"
}

// remake deletes the table and makes it again, in one transaction.
func (o *nativeOwner) remake(w *nativeStory) string {
	e := w.k.edit(o.id)
	had := e.now != nil
	e.now = nil
	e.deed = native.Deed{Deleted: had, Rules: map[string]int{}, Elements: map[string]int{}}
	e.table()
	e.declare(services)
	wanted := o.wanted()
	for _, c := range wanted.Chains {
		e.write(c)
	}
	for slot := range o.slot {
		e.put(services, o.element(slot))
	}
	if err := w.ownerCommits(o, e, w.ledger.all(o.id, wanted)); err != nil {
		return "remake: " + err.Error()
	}
	o.done = maps.Clone(o.slot)
	return "remade"
}

// leave deletes the table for good.
func (o *nativeOwner) leave(w *nativeStory) string {
	e := w.k.edit(o.id)
	if e.remove(); e.failed != nil {
		return "leaves: " + e.failed.Error()
	}
	o.gone = true
	if err := w.ownerCommits(o, e, w.ledger.all(o.id, nil)); err != nil {
		return err.Error()
	}
	for _, c := range w.ledger.chapters[o.id] {
		c.captured = -1
	}
	return "leaves for good"
}

// absent is the text of a part that does not exist.
const absent = "(absent)"

func chainText(c *native.Chain) string {
	var texts []string
	for _, r := range c.Rules {
		texts = append(texts, ruleText(r))
	}
	return "{" + strings.Join(texts, "; ") + "}"
}

// setText returns a set's elements in order. It leaves out the element of a full sync's request.
func setText(s *native.Set) string {
	var texts []string
	for _, e := range s.Elements {
		if targetOf(e) != native.SyncChain {
			texts = append(texts, targetOf(e))
		}
	}
	slices.Sort(texts)
	return "{" + strings.Join(texts, ", ") + "}"
}

// partsOf returns the chains and sets of a table as text.
func partsOf(t *native.Table) map[string]string {
	all := map[string]string{}
	if t == nil {
		return all
	}
	for i := range t.Chains {
		if c := &t.Chains[i]; c.Name != native.SyncChain {
			all["chain "+c.Name] = chainText(c)
		}
	}
	for i := range t.Sets {
		all["set "+t.Sets[i].Name] = setText(&t.Sets[i])
	}
	return all
}

// cast returns the owners of a story, with their tables of the beginning.
func nativeCast() []*nativeOwner {
	all := []*nativeOwner{
		{kind: proxies, id: proxyTable, comm: "kube-proxy"},
		{kind: proxies, id: tableid.IPv6.Table(owners.ProxyTable), comm: "kube-proxy"},
		{kind: dockers, id: dockerTable, comm: "dockerd"},
		{kind: remakes, id: tableid.Inet.Table("mine"), comm: "minder"},
		{kind: leavers, id: tableid.Inet.Table("netavark"), comm: "netavark"},
	}
	for i, o := range all {
		o.pid, o.synced = uint32(100+i), true
		o.slot = map[int]int{0: 1, 1: 2, 2: 3}
		o.done = maps.Clone(o.slot)
	}
	return all
}

func ruleText(r native.Rule) string {
	return string(nft.AttrPath(r.Attrs, unix.NFTA_RULE_USERDATA))
}
