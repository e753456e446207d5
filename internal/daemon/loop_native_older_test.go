package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// openNative is open with a store of native tables.
func (f *fullDisk) openNative() setup {
	return setup{store: f.open(), nativeStore: nativestore.New(f.dir, nativestore.Identity{BootID: f.id.BootID, NetNS: "n", Release: "6.18"})}
}

// TestOlderNativeGeneration: the disk refuses the last native tables, and canaryd restarts. It
// learns unchanged tables, and restores flushed ones from the older generation. Record, log and
// status say so. A lost table that was never on disk is not healthy, and a table that its owner
// removed stays removed.
func TestOlderNativeGeneration(t *testing.T) {
	mine := tableid.Inet.Table("mine")
	const older = "one change since was not kept"
	flush := (*fakeNative).flushRuleset
	type story struct {
		change, down func(k *fakeNative) // while the disk is full, and while canaryd is down
		want         []*native.Table     // tables that exist in the end
		gone         tableid.TableID     // a table that does not
		older        string              // text of record, headline and status; "": no record
		unready      string
		log          string
	}
	sync := func(k *fakeNative) { k.sync(tableOf(proxyTable, "a", "b", "c")) }
	for name, s := range map[string]story{
		"flushed": {change: sync, down: flush, want: []*native.Table{tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c")}, older: older,
			log: `"The stored rules are older than the last rules in force; canaryd puts flushed rules back from them" tables=["ip kube-proxy"]`},
		"not flushed": {change: sync, down: func(*fakeNative) {}, want: []*native.Table{tableOf(proxyTable, "a", "b", "c"), tableOf(dockerTable, "c")},
			log: "The stored rules are older than the last rules in force"},
		"only what is not older was flushed": {change: sync, down: func(k *fakeNative) { k.flushTable(dockerTable) },
			want: []*native.Table{tableOf(proxyTable, "a", "b", "c"), tableOf(dockerTable, "c")}},
		"its owner removed a rule, and all of the table was emptied": {change: func(k *fakeNative) { k.sync(tableOf(proxyTable, "a")) },
			down: func(k *fakeNative) { k.flushTable(proxyTable) }, want: []*native.Table{tableOf(proxyTable, "a", "b")}, older: older},
		"its owner removed it": {change: func(k *fakeNative) {
			k.origin.Ancestors = []string{"kube-proxy"}
			k.deleteTable(proxyTable)
			k.origin.Ancestors = nil
		}, down: flush, want: []*native.Table{tableOf(dockerTable, "c")}, gone: proxyTable},
		"never on disk, and flushed": {change: func(k *fakeNative) { k.again(tableOf(mine, "m")) }, down: flush,
			want: []*native.Table{tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c")}, gone: mine, unready: "table inet mine"},
		"never on disk, and not flushed": {change: func(k *fakeNative) { k.again(tableOf(mine, "m")) }, down: func(*fakeNative) {},
			want: []*native.Table{tableOf(mine, "m"), tableOf(proxyTable, "a", "b")}},
	} {
		t.Run(name, func(t *testing.T) {
			disk := newFullDisk(t, iptables.NFT)
			k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
			bubbleDisk(t, disk, k, func(t *testing.T, r *rig) {
				disk.fill()
				s.change(k)
				r.after(time.Minute)
				if got := r.d.Status(); got.StateError == "" || got.StateBehind != 1 || got.StateSaved.IsZero() || !got.Healthy {
					t.Errorf("the disk is full: %q, %d behind, saved %s, healthy %t", got.StateError, got.StateBehind, got.StateSaved, got.Healthy)
				}
				r.stop()
				disk.clear()
				s.down(k)
				k.Hear(0)
				r = disk.start(r, k)
				for _, want := range s.want {
					k.wantNative(t, want)
				}
				if s.gone != (tableid.TableID{}) && k.standing(s.gone) != nil {
					t.Errorf("%s stands", s.gone.NFT())
				}
				if s.log != "" {
					r.wantLog(s.log)
				}
				got := r.d.Status()
				if s.unready != "" {
					r.wantNotReady(s.unready)
					_, err := r.d.Dismiss(t.Context())
					must(t, err)
					r.settled()
				} else if s.older == "" && (got.StateOlder != "" || strings.Contains(got.Headline, "older")) {
					t.Errorf("headline %q, older %q", got.Headline, got.StateOlder)
				}
				r.wantReady()
				if s.older != "" && (len(got.Flushes) != 1 || !strings.Contains(got.Flushes[0].Older, s.older) || !strings.Contains(got.StateOlder, s.older) || !strings.Contains(got.Headline, s.older)) {
					t.Errorf("headline %q, older %q, records %+v", got.Headline, got.StateOlder, got.Flushes)
				}
				r.after(2 * confirmEvery)
				if _, err := os.Stat(filepath.Join(disk.aside, "behind.json")); err == nil {
					t.Error("the native tables are on disk, and the note that they are behind stays")
				}
				if name != "flushed" {
					return
				}
				k.sync(tableOf(proxyTable, "d")) // canaryd learns it, so nothing is older any more
				r.after(10 * time.Second)
				k.flushRuleset()
				r.after(10 * time.Second)
				k.wantNative(t, tableOf(proxyTable, "d"))
				if got := r.d.Status(); len(got.Flushes) != 2 || got.Flushes[0].Older != "" || got.Flushes[1].Older == "" {
					t.Errorf("records after another flush: %+v", got.Flushes)
				}
			})
		})
	}
}

// bubbleDisk runs a daemon with that state folder, in virtual time, until its tables are on
// disk.
func bubbleDisk(t *testing.T, disk *fullDisk, k *fakeNative, body func(t *testing.T, r *rig)) {
	t.Helper()
	s := disk.openNative()
	s.guarded = k
	nativeNode(t, s, func(t *testing.T, r *rig, _ *fakeNative) {
		disk.t = t
		r.after(5 * time.Second)
		body(t, r)
	})
}

// start starts the next daemon on the node of another.
func (f *fullDisk) start(r *rig, k *fakeNative) *rig {
	s := f.openNative()
	s.guarded = k
	next := run(r.t, r.fake, s)
	next.after(10 * time.Second)
	return next
}

// TestOlderNativeGenerationAfterAReboot: the note and the stored tables are of another boot.
// canaryd learns the owners' tables, and mentions no older generation.
func TestOlderNativeGenerationAfterAReboot(t *testing.T) {
	disk := newFullDisk(t, iptables.NFT)
	k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
	bubbleDisk(t, disk, k, func(t *testing.T, r *rig) {
		disk.fill()
		k.sync(tableOf(proxyTable, "a", "b", "c"))
		r.after(time.Minute)
		r.stop()
		disk.clear()
		disk.id.BootID = "the next boot"
		k.flushRuleset()
		k.again(tableOf(proxyTable, "z"))
		k.Hear(0)
		r = disk.start(r, k)
		r.wantReady()
		k.wantNative(t, tableOf(proxyTable, "z"))
		if s := r.d.Status(); k.standing(dockerTable) != nil || len(s.Flushes) > 0 || s.StateOlder != "" || s.Headline != "healthy" {
			t.Errorf("after a reboot: %q, older %q, records %+v", s.Headline, s.StateOlder, s.Flushes)
		}
	})
}

// TestUnreadableNoteOfNativeTables: the note cannot be read. The restored tables may be older,
// and record and status say so.
func TestUnreadableNoteOfNativeTables(t *testing.T) {
	disk := newFullDisk(t, iptables.NFT)
	k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
	bubbleDisk(t, disk, k, func(t *testing.T, r *rig) {
		disk.fill()
		k.sync(tableOf(proxyTable, "a", "b", "c"))
		r.after(time.Minute)
		r.stop()
		disk.clear()
		damage(t, filepath.Join(disk.aside, "behind.json"), damages["truncated"])
		k.flushRuleset()
		k.Hear(0)
		r = disk.start(r, k)
		r.wantReady()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantLog("the stored rules may be older than the last rules in force")
		const want = "a generation that may be older"
		if s := r.d.Status(); len(s.Flushes) != 1 || !strings.Contains(s.Flushes[0].Older, want) || !strings.Contains(s.StateOlder, want) {
			t.Errorf("older %q, records %+v", s.StateOlder, s.Flushes)
		}
		_, err := r.d.Dismiss(t.Context())
		must(t, err)
		r.settled()
		if s := r.d.Status(); s.StateOlder != "" {
			t.Errorf("accepted, and older: %q", s.StateOlder)
		}
	})
}

// TestOldAndOlderNativeGeneration: the disk was full for longer than --max-stored-age. A flush
// while canaryd was down waits for a decision, and the restored table is reported as older.
func TestOldAndOlderNativeGeneration(t *testing.T) {
	disk := newFullDisk(t, iptables.NFT)
	k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
	bubbleDisk(t, disk, k, func(t *testing.T, r *rig) {
		disk.fill()
		k.sync(tableOf(proxyTable, "a", "b", "c"))
		r.after(time.Hour)
		r.stop()
		disk.clear()
		k.flushTable(proxyTable)
		k.Hear(0)
		r = disk.start(r, k)
		r.wantNotReady("ip kube-proxy is emptied")
		if s := r.d.Status(); s.StateOlder != "" || len(s.Flushes) != 1 || s.Flushes[0].Outcome != api.AwaitingDecision {
			t.Errorf("before a decision: older %q, records %+v", s.StateOlder, s.Flushes)
		}
		_, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		must(t, err)
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
		const want = "one change since was not kept"
		if s := r.d.Status(); !strings.Contains(s.StateOlder, want) || !strings.Contains(s.Flushes[0].Older, want) {
			t.Errorf("older %q, records %+v", s.StateOlder, s.Flushes)
		}
	})
}

// TestNativeTablesOnDiskAgain: the disk was full, and takes native tables again. The log says
// so, as for iptables' tables.
func TestNativeTablesOnDiskAgain(t *testing.T) {
	disk := newFullDisk(t, iptables.NFT)
	k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
	bubbleDisk(t, disk, k, func(t *testing.T, r *rig) {
		const lost, over = `"The generation is not on disk`, `"The generation is on disk again"`
		disk.fill()
		k.sync(tableOf(proxyTable, "a", "b", "c"))
		r.after(time.Minute)
		disk.clear()
		r.after(2 * confirmEvery)
		for _, line := range []string{lost, over} {
			for _, tables := range []string{"nativeTables=0", "nativeTables=2"} {
				if !strings.Contains(linesOf(r.log.String(), line), tables) {
					t.Errorf("the log lacks %s with %s", line, tables)
				}
			}
		}
	})
}

// linesOf returns the lines of a log that contain a text.
func linesOf(log, text string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if strings.Contains(line, text) {
			b.WriteString(line)
		}
	}
	return b.String()
}
