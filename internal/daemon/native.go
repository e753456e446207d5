package daemon

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/accepted"
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file and native_*.go guard native nftables tables. They are a realm of their own: they have
// their own chores and losses, and each realm puts back its own. Without a table that --protect
// names there is no NativeKernel, and none of this is ever due.

// A NativeKernel reads, watches and writes native tables: *native.Kernel, but for tests.
type NativeKernel interface {
	nativestore.Kernel
	Genid() (uint32, error)
	Hear(genid uint32) (commits []native.Commit, missed bool, err error)
	Suspect(f func(native.Commit) bool)
	Follow(wanted func(nft.Table) bool) (*native.Ruleset, error)
	Refresh(budget time.Duration) (sets int, err error)
	Probe(id tableid.TableID, parts []native.Change) (native.Probe, error)
	TakeDrill(genid uint32, tables []*native.Table, kind native.Verdict) (at time.Time, err error)
	Append(b *nft.Batch, repairs []native.Repair, witnesses map[tableid.Family]string) (left []string, err error)
	RequestFullSync(genid uint32, t *native.Table) error
}

// NativeConfig holds the settings and objects for guarding native tables.
type NativeConfig struct {
	Kernel   NativeKernel                // nil: none are guarded
	Protects func(tableid.TableID) bool  // which are guarded
	Named    []tableid.TableID           // the guarded tables that are named one by one
	Rehearse func(t *native.Table) error // whether the kernel would take a table again; nil: no rehearsals
	Store    *nativestore.Store          // nil: nothing is kept
	Cleanup  func() error                // removes the witnesses
	// RemoveDrills removes the tables of drills, also those of an earlier run; nil: there are none.
	RemoveDrills func() error
	// Wake opens Kernel if there is a table that wanted accepts, or if wanted is nil. It
	// reports whether Kernel is open. nil: it is open.
	Wake func(wanted func(nft.Table) bool) (bool, error)
}

const (
	// deedsKept bounds the deeds that are remembered of one table while it is not read.
	deedsKept = 512
	// interruptedMost is how often in a row commits may interrupt the list of tables before
	// canaryd reports that. The list fits into one datagram nearly always.
	interruptedMost = 20
	// wakeEvery bounds how often the names of tables are listed while none is guarded.
	wakeEvery = 250 * time.Millisecond
	// refreshEvery is how often elements are read that packets add and time takes. refreshMost
	// is how long that may take: 1 % of a core. Each set of kube-proxy's session affinity takes
	// 0.4 ms at 5,000 services (Linux 6.18).
	refreshEvery = 2 * time.Second
	refreshMost  = 20 * time.Millisecond
	refreshShare = 99
)

// nativeRealm is the loop's knowledge of native tables.
type nativeRealm struct {
	tables  map[tableid.TableID]*nativeTable
	immune  map[tableid.TableID]bool // tables that one process owns
	witness map[tableid.Family]native.Witness
	lookAt  time.Time // of the next look
	hinted  time.Time // when the hint arrived that the look answers
	heard   time.Time // when deeds of commits were last heard; zero: never
	stalls  stalls    // the last ones: a loss may be recorded only after the next stall
	readAt  time.Time // when changed tables are read; zero: none are
	// refreshAt is when elements are read that packets add and time takes; zero: there are none.
	refreshAt  time.Time
	pace       nativePace                     // of reads
	plantAt    time.Time                      // when witnesses are planted
	all        bool                           // some commits were missed: each table is to be read
	fresh      bool                           // there is a new table that is to be guarded
	begun      bool                           // all tables were read once
	edition    int                            // changes of the tables' values
	asleep     bool                           // no table to guard has existed yet: Kernel is not open
	asked      time.Time                      // when such a table was last looked for
	torn       int                            // how often in a row that was interrupted
	known      time.Time                      // when the content of all of them was last known
	overLimit  int                            // tables that are too many
	trouble    pace.Trouble                   // why they cannot be looked at
	unread     pace.Trouble                   // why changed tables cannot be read, until a read succeeds
	limits     pace.Trouble                   // too many tables
	unplanted  pace.Trouble                   // why a witness is missing
	loss       *nativeLoss                    // the open one; nil while nothing is to be put back
	waiting    map[tableid.TableID]*api.Flush // records of tables that are lost and not put back
	wrote      time.Time                      // when another process was last heard to commit
	comings    comings
	contention contention
	drill      nativeDrill
	// removed is when an owner was last heard to delete its table, by the table's name.
	removed map[string]time.Time
	disk    nativeDisk
	older   older // stored tables of the last run that are older than the last in force
	// neverKept are tables of the last run that were never on disk, until all tables were read.
	neverKept []reload.BehindTable
}

// A nativeTable is one guarded table.
type nativeTable struct {
	want   *native.Table // the content that ought to be in force
	genid  uint32        // at which it was read
	read   time.Time
	leftAt time.Time // when the remaining times of its timeouts were read
	digest native.Digest
	// made is the origin of its content, and captured when it was learned.
	made     reload.Made
	captured time.Time
	witness  string // the witness's nonce of then
	// deeds are the deeds of commits since then; missed: some of these were not heard of.
	deeds  []nativeDeed
	missed bool
	// unheard: commits since then or since canaryd's last write were missed. Unlike missed it lasts
	// until the table is learned, because a lost part may have gone with them.
	unheard bool
	// wroteAt is the genid of canaryd's last write of it since then; 0: there was none.
	wroteAt uint32
	// removed are chains that its owner deleted while parts of it were lost.
	removed map[string]bool
	dirty   time.Time // since when it may differ; zero: it does not
	urgent  bool      // a commit had the effect of a flush
	moved   time.Time // of the last commit to it
	// wrote is when the last commit that did not delete it was noted, or when it was first seen.
	wrote   time.Time
	finding native.Finding
	// foundAs is the digest of the content that was found lost last, and foundAt the genid of the
	// read that showed it first.
	foundAs native.Digest
	foundAt uint32
	// old: it was stored too long ago to be put back unasked.
	old bool
	// proxyAway: when it was found deleted alone, kube-proxy was not at work in iptables mode.
	// switched: it is by now.
	proxyAway, switched bool
	// reportAt is when a table is reported that was deleted alone, by a process that canaryd
	// could not read in time. Zero: the report is not put off.
	reportAt time.Time
	// accept: an operator has accepted the table as it is now.
	accept bool
	// rehearsal checks whether the kernel would take the table again. refused is why it would
	// not, and refusedParts the parts of the table; empty for all of it.
	rehearsal    rehearsal
	refused      pace.Trouble
	refusedParts []native.Held
	policies     accepted.Policies
	// inForce is the ID of the content that was in force when the last run ended, if want is
	// older; else "".
	inForce string
	// replayed: canaryd wrote it, and its owner has not written it since. fullSync is when canaryd
	// requests a full sync from kube-proxy.
	replayed bool
	fullSync pace.Retry
	out      *nativeLeftOut // nil: the table is not left out
	drill    bool           // it is a table of the present drill
}

// A nativeDeed is the effect of a commit on a table, with its author and time.
type nativeDeed struct {
	*native.Deed
	commit nft.Commit
	since  time.Time // the first evidence of it
}

// took reports whether the commit deleted something in the table.
func (d nativeDeed) took() bool { return len(d.Rules)+len(d.Elements)+d.Lost > 0 }

// newNativeRealm returns the loop's knowledge of native tables before any read. If Wake is set,
// canaryd reads none until there is a table to guard.
func (d *Daemon) newNativeRealm() nativeRealm {
	r := nativeRealm{tables: map[tableid.TableID]*nativeTable{}, immune: map[tableid.TableID]bool{},
		witness: map[tableid.Family]native.Witness{}, waiting: map[tableid.TableID]*api.Flush{}, contention: newContention("native"),
		drill: nativeDrill{removeAt: time.Now()}}
	if d.guardsNative() {
		r.asleep = d.cfg.Native.Wake != nil
		r.lookAt, r.all = time.Now(), !r.asleep
		if !r.asleep {
			d.cfg.Native.Kernel.Suspect(d.suspects)
		}
	}
	return r
}

// standsOf reports whether a table is in force with the content of that ID.
func (r *nativeRealm) standsOf(id string) bool {
	return anyOf(r.tables, func(t *nativeTable) bool { return !t.lost() && nativestore.IDOf(t.digest) == id })
}

func (d *Daemon) guardsNative() bool { return d.cfg.Native.Kernel != nil }

// hintNative makes a look due because of something that happened just now: a hint, a poll, or
// the end of a loss.
func (d *Daemon) hintNative(st *state, now time.Time) {
	if d.guardsNative() {
		st.native.hinted, st.native.lookAt = pace.Earliest(st.native.hinted, now), now
	}
}

// unknown returns why the state of native tables is not known now; "": it is. A look that hears
// commits reads no table, so it does not end the failure of a read.
func (r *nativeRealm) unknown() string {
	if r.trouble.There() {
		return r.trouble.What
	}
	return r.unread.What
}

// lost reports whether the table lacks content that ought to be in force.
func (t *nativeTable) lost() bool { return nativestore.Lost(t.finding.Verdict) }

// ids returns the guarded tables in their order.
func (r *nativeRealm) ids() []tableid.TableID {
	list := slices.Collect(maps.Keys(r.tables))
	sorting.Stable(list, tableid.TableID.Compare)
	return list
}

// families returns the families that have guarded tables: each has a witness.
func (r *nativeRealm) families() []tableid.Family {
	var all []tableid.Family
	for _, id := range r.ids() {
		all = append(all, id.Family)
	}
	return slices.Compact(all)
}

// nativeChores are the rows of the loop's table that are about native tables. They follow the
// heal of iptables' tables.
func (d *Daemon) nativeChores() []chore {
	return []chore{
		{"look at native tables", func(st *state) time.Time { return st.native.lookAt }, nil, readLimit, d.lookNative},
		{"heal native tables", func(st *state) time.Time { return st.native.loss.retry.At }, func(st *state) bool { return st.native.loss != nil }, d.settleLimit(), d.healNative},
		{"read native tables", func(st *state) time.Time { return st.native.readAt }, mayReadNative, readLimit, d.readNative},
		{"read what packets add to native tables", func(st *state) time.Time { return st.native.refreshAt }, noNativeReplay, readLimit, d.refreshNative},
		{"request full syncs in nftables mode", func(st *state) time.Time { return st.native.fullSyncAt() }, mayWriteNative, briefLimit, d.requestFullSyncs},
		{"rehearse native tables", func(st *state) time.Time { return st.native.rehearseAt() }, noNativeReplay, readLimit, d.rehearseNative},
		{"remove tables of drills", func(st *state) time.Time { return st.native.drill.removeAt }, mayRemoveDrills, briefLimit, d.removeDrillTables},
		{"plant witnesses", func(st *state) time.Time { return st.native.plantAt }, mayReadNative, briefLimit, d.plantWitnesses},
		{"end the contention of native tables", func(st *state) time.Time { return st.native.contention.calmAt }, func(st *state) bool { return st.native.loss == nil }, briefLimit,
			func(ctx context.Context, st *state) { st.native.contention.end(ctx) }},
		{"save native tables", func(st *state) time.Time { return st.native.disk.saveAt }, (*state).maySave, diskLimit, d.saveNative},
	}
}

// mayReadNative reports whether changed tables are read now, and witnesses planted. A due
// replay does both itself. But while a replay waits because the kernel has refused a table,
// reads continue: others may be lost meanwhile. While a process keeps flushing and replays are
// limited, so are these: each witness is one more thing for it to delete.
func mayReadNative(st *state) bool {
	r, now := &st.native, time.Now()
	return noNativeReplay(st) || r.loss.retry.At.After(now) && !r.contention.contended()
}

// noNativeReplay reports whether no replay is due that reads and plants by itself.
func noNativeReplay(st *state) bool { return st.native.loss == nil || !st.heals() }

// mayWriteNative reports whether native tables may be written and no replay is due.
func mayWriteNative(st *state) bool { return st.native.loss == nil && st.heals() }

// nativeSound reports whether all native tables are known to be in force.
func (d *Daemon) nativeSound(st *state) bool {
	r := &st.native
	return r.begun && !r.all && r.loss == nil && r.unknown() == "" && !anyOf(r.tables, (*nativeTable).lost)
}

// lookAgain plans a look that much later in the place of one that failed, unless the run ends.
func (r *nativeRealm) lookAgain(ctx context.Context, after time.Duration) {
	if ctx.Err() == nil {
		r.lookAt = time.Now().Add(after)
	}
}
