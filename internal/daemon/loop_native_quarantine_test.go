package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestNativeQuarantine: a native table's rule stays in quarantine while its owner writes another
// one, and not when the owner makes its table again. `canaryd check` without a daemon knows it.
func TestNativeQuarantine(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
		left int
		want *native.Table
		ends api.Outcome
	}{
		{"another rule", func(k *fakeNative) { k.sync(tableOf(proxyTable, "a", "new")) }, 1, tableOf(proxyTable, "a", "new"), reload.Partial},
		{"its table", func(k *fakeNative) { k.again(tableOf(proxyTable, "a", "c")) }, 0, tableOf(proxyTable, "a", "c"), reload.Proved},
		{"a file", func(k *fakeNative) { k.reload(tableOf(proxyTable, "old")) }, 1, tableOf(proxyTable, "a"), reload.Partial},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := nativestore.New(t.TempDir(), nativestore.Identity{})
			nativeNode(t, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.refusesRule = "b" })
				k.flushRuleset()
				r.after(time.Second)
				r.wantQuarantine(1)
				test.do(k)
				r.after(time.Minute)
				r.wantQuarantine(test.left)
				k.wantNative(t, test.want)
				if f := r.records(0)[0]; f.Outcome != test.ends {
					t.Errorf("the record ends %s, want %s", f.Outcome, test.ends)
				}
				r.stop()
				rows, parts, err := store.CheckStored(k, func(id tableid.TableID) bool { return id == proxyTable })
				if err != nil || len(rows) != 1 || (rows[0].Verdict == canary.Partial) != (test.left > 0) || rows[0].QuarantinedParts != test.left || len(parts) != test.left {
					t.Errorf("a check says %+v, %+v, %v", rows, parts, err)
				}
			})
		})
	}
}

// TestARecordThatLacksADevice: a replay left out a device and a rule. The rule comes back, and the
// record stays partial.
func TestARecordThatLacksADevice(t *testing.T) {
	nativeNode(t, setup{}, func(_ *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.refusesRule, k.lacking = "b", []string{"eth9"} })
		k.flushRuleset()
		r.after(10 * time.Second)
		r.wantQuarantine(1)
		k.with(func() { k.refusesRule = "" })
		r.after(time.Minute)
		r.wantQuarantine(0)
		r.wantOneFlush("table_deleted", reload.Partial)
	})
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
		r.wantQuarantine(1)
		r.wantLog("The rules are back, but some had to be left out, or are not proved")
	})
}
