// Package iptablestest is iptables in memory, for tests: a kernel, the programs that write to it,
// and faults on demand.
//
// A [Fake] has the methods of an iptables.Kernel, and methods for other programs that write.
// They may be called from several goroutines.
package iptablestest

import (
	"context"
	"encoding/binary"
	"hash/fnv"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Fake is one network namespace's iptables in memory, for tests without root. It has Kernel's
// methods, the writes of other programs (Writer, which it embeds), and faults on demand.
//
// It behaves as measured with the kernel and the tools of its backend. On nft, the first write
// creates a table and its built-in chains, and all of them can be deleted. Each commit with a
// change moves the genid, which both families share, and informs the listeners. On legacy a
// table is complete from its first mention on, and stays. Only the release of the xtables lock
// announces a write. A Stamp does not show a rule that replaces another.
//
// All methods may be called from several goroutines. Listeners and hooks run in the writing
// goroutine, without a lock of the Fake, so they may call the Fake. Only a legacy session still
// has the xtables lock then. A Fake does no I/O and waits only for channels and timers, so it
// works in a synctest bubble.
type Fake struct {
	// Writer is the default program for writes.
	Writer

	kind     iptables.Backend // never changes
	families []rules.Family
	lock     chan struct{} // the xtables lock: full while another process holds it
	sets     *Sets         // objects besides chains that rules depend on

	mu         sync.Mutex
	info       iptables.Info
	tables     map[rules.TableID]*rules.Table // sorted; never changed in place, nor is their rules' memory
	sums       map[*rules.Table]uint64        // of tables' content, once a read needs them
	genid      uint32
	unreadable map[rules.TableID]error
	onCommit   []func(nft.Commit)
	onUnlock   []func()
	faults     faults
	evidence   evidence
	counts     counts
	payloads   map[rules.Family][]string
	takings    iptables.Takings
	before     map[rules.TableID][]lastMoment
	passenger  Passenger // nil: none
}

// NewFake returns a namespace of backend without any writes. No families means both. In a test
// that uses synctest, call it inside the bubble.
func NewFake(backend iptables.Backend, families ...rules.Family) *Fake {
	if len(families) == 0 {
		families = rules.Families()
	}
	f := &Fake{
		kind:       backend,
		families:   slices.Sorted(slices.Values(families)),
		lock:       make(chan struct{}, 1),
		sets:       newSets(),
		info:       iptables.Info{Backend: backend, Version: "1.8.9", Reason: "a fake", RandomFully: true},
		tables:     map[rules.TableID]*rules.Table{},
		sums:       map[*rules.Table]uint64{},
		genid:      1,
		unreadable: map[rules.TableID]error{},
		payloads:   map[rules.Family][]string{},
		before:     map[rules.TableID][]lastMoment{},
	}
	f.Writer = Writer{fake: f, pid: 4242, comm: "iptables"}
	return f
}

// Copy returns a Fake with the same tables and genid, for which no commit is known yet. It has
// no listeners and no faults, and does not have f's ipsets. In a test that uses synctest, call
// it inside the bubble; f may be from outside.
func (f *Fake) Copy() *Fake {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := NewFake(f.kind, f.families...)
	c.info, c.genid, c.tables, c.sums = f.info, f.genid, maps.Clone(f.tables), maps.Clone(f.sums)
	c.takings = iptables.Takings{Since: f.takings.Since, List: slices.Clone(f.takings.List)}
	return c
}

// Info returns the Info of SetInfo, or a plain 1.8.9 of the Fake's backend.
func (f *Fake) Info() iptables.Info {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.info
}

// SetInfo changes the result of Info. The backend stays unchanged.
func (f *Fake) SetInfo(info iptables.Info) {
	f.mu.Lock()
	defer f.mu.Unlock()
	info.Backend = f.kind
	f.info = info
}

// Families returns the families of NewFake, in their fixed order.
func (f *Fake) Families() []rules.Family { return slices.Clone(f.families) }

func (f *Fake) backend() iptables.Backend { return f.kind }

// Stamp returns the genid on nft, and a hash of the numbers of chains and rules on legacy. It
// fails like Probe.
func (f *Fake) Stamp(ctx context.Context, family rules.Family) (iptables.Stamp, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.stamps++
	if err := f.mayRead(ctx, family, f.faults.probes); err != nil {
		return iptables.Stamp{}, err
	}
	if f.backend() == iptables.NFT {
		return iptables.Stamp{Value: uint64(f.genid), Exact: true}, nil
	}
	var stamp iptables.Stamp
	h := fnv.New64a()
	for _, t := range f.ordered(family) {
		_, _ = h.Write(binary.BigEndian.AppendUint64([]byte(t.Name), uint64(len(t.Chains))<<32|uint64(t.RuleCount())))
		if i := slices.Index(protect.Tables(), t.Name); i >= 0 {
			// About as large as the kernel's entries.
			stamp.Shapes[i] = iptables.Shape{
				Value: uint64(len(t.Chains))<<32 | uint64(t.RuleCount()),
				Size:  uint32(300*len(t.Chains) + 400*t.RuleCount()),
			}
		}
	}
	stamp.Value = h.Sum64()
	return stamp, nil
}

// ProbeOnly returns the Holding of each place. It fails like Probe.
func (f *Fake) ProbeOnly(ctx context.Context, family rules.Family, places []iptables.Place) (iptables.Probed, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.urgentProbes++
	if err := f.mayRead(ctx, family, f.faults.probes); err != nil {
		return iptables.Probed{}, err
	}
	only := iptables.Probed{Holdings: f.holdings(family, places)}
	if f.kind == iptables.NFT {
		only.Digest = f.digest(family)
	}
	return only, nil
}

// Probe returns the Holding of each place. Like the kernel's own answer, it shows tables that
// DropTableFromReads hides. It fails with ErrNoFamily, with FailProbes' error, with ErrLocked
// after ReadsNeedLock, and after the end of ctx.
func (f *Fake) Probe(ctx context.Context, family rules.Family, places []iptables.Place) (iptables.Probed, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.probes++
	if err := f.mayRead(ctx, family, f.faults.probes); err != nil {
		return iptables.Probed{}, err
	}
	return iptables.Probed{Holdings: f.holdings(family, places), Digest: f.digest(family)}, nil
}

func (f *Fake) holdings(family rules.Family, places []iptables.Place) map[iptables.Place]iptables.Holding {
	holdings := make(map[iptables.Place]iptables.Holding, len(places))
	for _, p := range places {
		holdings[p] = f.holding(family, p)
	}
	return holdings
}

func (f *Fake) holding(family rules.Family, p iptables.Place) iptables.Holding {
	t := f.tables[family.Table(p.Table)]
	if t == nil {
		return iptables.Holding{Presence: iptables.NoTable}
	}
	c := t.Chain(p.Chain)
	if c == nil {
		return iptables.Holding{Presence: iptables.NoChain}
	}
	h := iptables.Holding{Presence: iptables.Present, Rules: len(c.Rules)}
	for _, r := range c.Rules {
		if r.Target != "" {
			continue
		}
		if text, found := r.Comment(); found {
			h.Comments = append(h.Comments, text)
		}
	}
	return h
}

// Read returns the whole content of the family's tables, as iptables-save prints it. It has all
// built-in chains of a table, even if nf_tables, and so Probe, does not have them yet. The
// tables share the Fake's memory, as the Kernel's share its mirror's: callers must not change
// them. It fails with ErrNoFamily, with FailReads' error, with ErrLocked after ReadsNeedLock,
// and after the end of ctx.
func (f *Fake) Read(ctx context.Context, family rules.Family) (iptables.Snapshot, error) {
	return f.read(ctx, family, false)
}

// read is Read; holder means that the caller has the xtables lock.
func (f *Fake) read(ctx context.Context, family rules.Family, holder bool) (iptables.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.reads++
	if err := f.mayReadAs(ctx, family, f.faults.reads, holder); err != nil {
		return iptables.Snapshot{}, err
	}
	return f.snapshot(family, f.digest(family)), nil
}

// snapshot returns the current content of the tables. Call with the Fake locked.
func (f *Fake) snapshot(family rules.Family, digest uint64) iptables.Snapshot {
	snap := iptables.Snapshot{
		Family:     family,
		Tables:     rules.Ruleset{},
		Unreadable: map[rules.TableName]error{},
		Digest:     digest,
	}
	for _, t := range f.ordered(family) {
		if err := f.unreadable[family.Table(t.Name)]; err != nil {
			snap.Unreadable[t.Name] = err
			continue
		}
		snap.Tables[t.Name] = printed(t)
	}
	return snap
}

// mayRead returns the error of a read by a caller without the lock, or nil.
func (f *Fake) mayRead(ctx context.Context, family rules.Family, fault error) error {
	return f.mayReadAs(ctx, family, fault, false)
}

func (f *Fake) mayReadAs(ctx context.Context, family rules.Family, fault error, holder bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !f.has(family) {
		return iptables.ErrNoFamily
	}
	if fault != nil {
		return fault
	}
	if f.faults.readsNeedLock && !holder && f.backend() == iptables.Legacy && len(f.lock) > 0 {
		return iptables.ErrLocked
	}
	return nil
}

func (f *Fake) has(family rules.Family) bool { return slices.Contains(f.families, family) }

// digest is the genid on nft, a hash of the content on legacy.
func (f *Fake) digest(family rules.Family) uint64 {
	if f.backend() == iptables.NFT {
		return uint64(f.genid)
	}
	h := fnv.New64a()
	for _, t := range f.ordered(family) {
		_, _ = h.Write(binary.BigEndian.AppendUint64(nil, f.sum(t)))
	}
	return h.Sum64()
}

// sum returns a hash of a table's content. Tests check thousands of times whether it has
// changed.
func (f *Fake) sum(t *rules.Table) uint64 {
	sum, known := f.sums[t]
	if !known {
		var h maphash.Hash
		h.SetSeed(seed)
		add := func(text string) {
			_, _ = h.WriteString(text) // never fails
			_ = h.WriteByte(0)
		}
		for _, c := range t.Chains {
			add("")
			add(c.Name)
			add(c.Policy)
			for _, r := range c.Rules {
				add(r.Spec)
			}
		}
		sum = h.Sum64()
		f.sums[t] = sum
	}
	return sum
}

// seed gives all Fakes the same sums.
var seed = maphash.MakeSeed()

// ordered returns family's tables in the fixed order of rules.AllTables.
func (f *Fake) ordered(family rules.Family) []*rules.Table {
	var tables []*rules.Table
	for _, name := range rules.AllTables() {
		if t := f.tables[family.Table(name)]; t != nil {
			tables = append(tables, t)
		}
	}
	return tables
}

// takeLock waits for the xtables lock, at most the time wait. Negative means without limit.
func (f *Fake) takeLock(ctx context.Context, wait time.Duration) error {
	select {
	case f.lock <- struct{}{}:
		return nil
	default:
	}
	if wait == 0 {
		return iptables.ErrLocked
	}
	var timeout <-chan time.Time
	if wait > 0 {
		t := time.NewTimer(wait)
		defer t.Stop()
		timeout = t.C
	}
	select {
	case f.lock <- struct{}{}:
		return nil
	case <-timeout:
		return iptables.ErrLocked
	case <-ctx.Done():
		return ctx.Err()
	}
}

// releaseLock frees the xtables lock and informs the listeners, as the kernel announces the
// close of a lock file.
func (f *Fake) releaseLock() {
	<-f.lock
	f.mu.Lock()
	listeners := slices.Clone(f.onUnlock)
	f.mu.Unlock()
	for _, fn := range listeners {
		fn()
	}
}
