package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// wantParts fails unless so many parts of kube-proxy's table are in quarantine, and all faces say
// so.
func (r *rig) wantParts(want int) {
	r.t.Helper()
	s := r.d.Status()
	i := slices.IndexFunc(s.Native, func(t api.NativeTable) bool { return t.Table == proxyTable.NFT() })
	if i < 0 {
		r.t.Fatalf("kube-proxy's table is not guarded: %+v", s.Native)
	}
	row := s.Native[i]
	if row.QuarantinedParts != want || len(s.Quarantined) != want || (row.Verdict == canary.Partial) != (want > 0) {
		r.t.Fatalf("the row says %+v, want %d parts in quarantine", row, want)
	}
	if (s.Ready() != nil) != (want > 0) || want > 0 && !strings.Contains(s.Headline, "could not be put back") {
		r.t.Errorf("with %d parts in quarantine: %q, ready: %v", want, s.Headline, s.Ready())
	}
	gauge := r.metrics("quarantined_rules")["quarantined_rules{family=ip,table=ip kube-proxy}"]
	if int(gauge) != want {
		r.t.Errorf("canaryd_quarantined_rules is %v, want %d; of %v", gauge, want, r.metrics("quarantined_rules"))
	}
	for _, q := range s.Public().Quarantined {
		if q.Rule != "" || q.Reason != "" || !q.Native {
			r.t.Errorf("all may read %+v", q)
		}
	}
}

// TestARefusedRuleCostsItself: after a flush the kernel refuses one rule. canaryd restores the
// others at once and quarantines that one, which counts as no other loss. It restores the rule
// once the kernel takes it, and the record ends.
func TestARefusedRuleCostsItself(t *testing.T) {
	for _, how := range []struct {
		name, kind string
		do         func(k *fakeNative)
	}{
		{"flush ruleset", "table_deleted", (*fakeNative).flushRuleset},
		{"flush table", "emptied", func(k *fakeNative) { k.flushTable(proxyTable) }},
		{"made again from a file", "table_deleted", func(k *fakeNative) { k.reload(tableOf(proxyTable, "old")) }},
	} {
		t.Run(how.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.refusesRule = "b" })
				how.do(k)
				r.after(time.Second)
				k.wantNative(t, tableOf(proxyTable, "a"))
				r.wantParts(1)
				r.wantOneFlush(how.kind, reload.Partial)
				heals := k.count().heals
				r.after(time.Minute) // canaryd tries it again, without a commit
				r.wantParts(1)
				if n := k.count().heals; n != heals {
					t.Errorf("%d replays, want %d", n, heals)
				}
				how.do(k) // the present rules are guarded as before
				r.after(time.Second)
				k.wantNative(t, tableOf(proxyTable, "a"))
				r.wantParts(1)
				k.with(func() { k.refusesRule = "" })
				r.after(time.Minute)
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				r.wantParts(0)
				r.wantReady()
				for _, f := range r.d.Status().Flushes {
					if f.Outcome != reload.Proved {
						t.Errorf("a record ends %s", f.Outcome)
					}
				}
				for _, line := range []string{"A part of a table is in quarantine", "Parts of a table were put back from quarantine", "Nothing that a flush took is missing any more"} {
					if !strings.Contains(r.log.String(), line) {
						t.Errorf("the log lacks %q", line)
					}
				}
			})
		})
	}
}

// TestAnOwnerEndsAQuarantine: a rule stays in quarantine while its owner writes other things.
// It leaves when the owner writes it, its chain or its table again, or an operator accepts its
// loss. Only the operator's decision leaves the record partial.
func TestAnOwnerEndsAQuarantine(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(r *rig, k *fakeNative)
		left int
		want *native.Table
	}{
		{"another rule", func(_ *rig, k *fakeNative) { k.sync(tableOf(proxyTable, "a", "new")) }, 1, tableOf(proxyTable, "a", "new")},
		{"the rule", func(_ *rig, k *fakeNative) { k.sync(tableOf(proxyTable, "a", "b")) }, 0, tableOf(proxyTable, "a", "b")},
		{"its chain", func(_ *rig, k *fakeNative) { k.sync(tableOf(proxyTable, "c", "d")) }, 0, tableOf(proxyTable, "c", "d")},
		{"its table", func(_ *rig, k *fakeNative) { k.again(tableOf(proxyTable, "a", "c")) }, 0, tableOf(proxyTable, "a", "c")},
		{"an operator", func(r *rig, _ *fakeNative) {
			reply, err := r.d.Dismiss(r.t.Context())
			if err != nil || reply.Quarantined != 1 {
				r.t.Errorf("%+v, %v", reply, err)
			}
		}, 0, tableOf(proxyTable, "a")},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.refusesRule = "b" })
				k.flushRuleset()
				r.after(time.Second)
				r.wantParts(1)
				test.do(r, k)
				r.after(time.Minute)
				r.wantParts(test.left)
				k.wantNative(t, test.want)
				k.with(func() { k.refusesRule = "" })
				r.after(time.Minute)
				r.wantParts(0)
				if test.left == 0 {
					k.wantNative(t, test.want)
				}
				ends := reload.Proved
				if test.name == "an operator" {
					ends = reload.Partial
				}
				r.wantOneFlush("table_deleted", ends)
			})
		})
	}
}

// TestWhatIsLearnedIsRehearsed: canaryd rehearses each change of a table, within a minute, also
// of a large one. It names the parts that the kernel would refuse.
func TestWhatIsLearnedIsRehearsed(t *testing.T) {
	many := slices.Repeat([]string{"x"}, 3*rehearseMost)
	for _, test := range []struct {
		name   string
		before []string
	}{{"a small table", []string{"a", "b"}}, {"a large one", many}} {
		t.Run(test.name, func(t *testing.T) {
			s := setup{guarded: newFakeNative(tableOf(proxyTable, test.before...), tableOf(dockerTable, "c"))}
			s.rehearse = func(table *native.Table) error {
				time.Sleep(5 * time.Millisecond)
				if c := table.Chain("services"); c != nil && slices.ContainsFunc(c.Rules, func(r native.Rule) bool { return strings.Contains(string(r.Attrs), "unreplayable") }) {
					return &native.UnreplayableError{Table: table.ID, Why: errNativeBroken, Parts: []native.Held{{Text: "rule services unreplayable"}}}
				}
				return nil
			}
			nativeNode(t, s, func(t *testing.T, r *rig, k *fakeNative) {
				refused := func() string {
					for _, row := range r.d.Status().Native {
						if row.Table == proxyTable.NFT() {
							return row.Unreplayable
						}
					}
					return "?"
				}
				r.after(5 * time.Second)
				k.sync(tableOf(proxyTable, append(test.before, "unreplayable")...))
				r.after(2 * time.Minute)
				if got := refused(); !strings.Contains(got, "rule services unreplayable") {
					t.Errorf("it is said that %q", got)
				}
				want := "healthy, but one part of a native table could not be put back if it were lost"
				if got := r.d.Status().Headline; got != want {
					t.Errorf("%q, want %q", got, want)
				}
				if got := r.metrics("native_table_refused")["native_table_refused{family=ip,table=ip kube-proxy}"]; got != 1 {
					t.Errorf("the metric is %v", r.metrics("native_table_refused"))
				}
				k.sync(tableOf(proxyTable, test.before...))
				r.after(2 * time.Minute)
				if got := refused(); got != "" {
					t.Errorf("still %q", got)
				}
				if got := r.d.Status().Headline; got != "healthy" {
					t.Error(got)
				}
			})
		})
	}
}

// TestARestoreOfARefusedRuleIsPartial: an operator requests a table, and the kernel refuses a
// rule in it. The reply says so.
func TestARestoreOfARefusedRuleIsPartial(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.deleteTable(proxyTable)
		r.after(time.Second)
		k.with(func() { k.refusesRule = "b" })
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		i := slices.IndexFunc(reply.Native, func(n api.NativeRestored) bool { return n.Table == proxyTable.NFT() })
		if err != nil || i < 0 || reply.Native[i].Outcome != reload.Partial || !strings.Contains(reply.Native[i].Detail, "quarantine") {
			t.Errorf("%+v, %v", reply.Native, err)
		}
		r.wantParts(1)
		r.wantLog("The rules are back, but some had to be left out, or are not proved")
	})
}

// TestANativeQuarantineSurvivesARestart: the next run knows the quarantine, also if the table
// was flushed in between. `canaryd check` without a daemon knows it too.
func TestANativeQuarantineSurvivesARestart(t *testing.T) {
	for _, flushed := range []bool{false, true} {
		t.Run(fmt.Sprintf("flushed between them: %t", flushed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k, store := newFakeNative(tableOf(proxyTable, "a", "b")), nativestore.New(t.TempDir(), nativestore.Identity{})
				r := start(t, iptables.NFT, setup{guarded: k, nativeStore: store})
				r.after(time.Minute)
				k.with(func() { k.refusesRule = "b" })
				k.flushRuleset()
				r.after(time.Minute)
				r.wantParts(1)
				r.stop()
				rows, parts, err := store.CheckStored(k, func(tableid.TableID) bool { return true })
				if err != nil || len(rows) != 1 || rows[0].Verdict != canary.Partial || rows[0].QuarantinedParts != 1 || len(parts) != 1 {
					t.Errorf("a check says %+v, %v", rows, err)
				}
				if flushed {
					k.flushTable(proxyTable)
					k.with(func() { k.unheard = nil })
				}
				r = run(t, r.fake, setup{guarded: k, nativeStore: store})
				r.after(time.Minute)
				r.wantParts(1)
				k.wantNative(t, tableOf(proxyTable, "a"))
				k.with(func() { k.refusesRule = "" })
				r.after(time.Minute)
				r.wantParts(0)
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
			})
		})
	}
}
