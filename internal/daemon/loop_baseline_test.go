package daemon

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// poison is a rule that another process adds to a chain of kube-proxy's.
const poison = "-s 203.0.113.7/32 -m comment --comment SECRET -j ACCEPT"

// A poisoned node is a node with a baseline whose stories are about one kind of table.
type poisonedNode struct {
	*rig
	setup  func() setup // of the next run
	poison func()       // another process adds a rule, which canaryd learns
	flush  func()       // another process takes the rules
	back   func() bool  // whether the added rule is in force
	want   api.BaselineChange
	id     func() string // of the guarded content
}

// restart ends the daemon and starts another one on the same kernel and state folder.
func (n *poisonedNode) restart() {
	n.stop()
	*n.rig = *run(n.t, n.fake, n.setup())
	n.after(5 * time.Second)
}

// wantPreview fails unless a dry run marks the added rule, and nothing else.
func (n *poisonedNode) wantPreview(when string, dry api.RestoreReply, clean string) {
	n.t.Helper()
	if dry.Baseline == nil || dry.Baseline.Generation != clean {
		n.t.Fatalf("%s: compared with %+v", when, dry.Baseline)
	}
	marked := 0
	for _, c := range dry.Changes {
		marked += c.NotInBaseline
		if c.Family == n.want.Family && c.Table == n.want.Table {
			added := "+" + n.want.Rules[0]
			if d := cmp.Diff([]string{added}, c.Lines[:c.NewLines]); d != "" || strings.Count(strings.Join(c.Lines, "\n"), added) != 1 {
				n.t.Errorf("%s: marked (-want +got):\n%s\nof %q", when, d, c.Lines)
			}
			if len(c.Lines)+c.More != c.Adds.Rules+c.Adds.Chains+c.Removes.Rules+c.Removes.Chains {
				n.t.Errorf("%s: %d lines and %d more of %+v", when, len(c.Lines), c.More, c)
			}
		}
	}
	for _, t := range dry.Native {
		marked += t.NotInBaseline
	}
	if marked != 1 {
		n.t.Errorf("%s: %d rules are marked in %+v", when, marked, dry)
	}
}

// eachPoisoned runs a story on both backends of iptables, and about a native table.
func eachPoisoned(t *testing.T, mode api.Mode, story func(n *poisonedNode)) {
	t.Helper()
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, records := t.TempDir(), t.TempDir()
		n := &poisonedNode{setup: func() setup {
			return setup{store: openStore(t, dir, identity(backend)), journal: records, mode: mode}
		}}
		n.rig = start(t, backend, n.setup())
		n.poison = n.poisoned
		n.flush = func() { must(t, n.programs().Flush(t.Context(), rules.IPv4, rules.Filter, "")) }
		n.back = func() bool {
			return strings.Contains(fmt.Sprint(n.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD")), poison)
		}
		n.want = api.BaselineChange{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD", Known: true, Appeared: 1, Rules: []string{"-A KUBE-FORWARD " + poison}}
		n.id = func() string { return n.d.Status().Generation.ID }
		story(n)
	})
	t.Run("native", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dir, natives, records, k := t.TempDir(), t.TempDir(), t.TempDir(), newFakeNative(tableOf(proxyTable, "a", "b"))
			n := &poisonedNode{setup: func() setup {
				return setup{store: openStore(t, dir, identity(iptables.NFT)), journal: records, mode: mode, guarded: k, nativeStore: nativestore.New(natives, nativestore.Identity{})}
			}}
			n.rig = start(t, iptables.NFT, n.setup())
			n.after(2 * time.Second)
			n.poison = func() {
				k.addRule(proxyTable, poison)
				n.after(10 * time.Second)
			}
			n.flush = func() { k.flushTable(proxyTable) }
			n.back = func() bool { return len(k.standing(proxyTable).Chain("services").Rules) == 3 }
			n.want = api.BaselineChange{Family: rules.IPv4, Table: proxyTable.Name, Native: true, Chain: "services", Known: true, Appeared: 1,
				Rules: []string{"rule services  userdata 0x" + hex.EncodeToString([]byte(poison))}}
			n.id = func() string { return n.present(proxyTable) }
			story(n)
		})
	})
}

func (r *rig) baseline(request api.BaselineRequest) api.BaselineReply {
	r.t.Helper()
	reply, err := r.d.Baseline(r.t.Context(), request)
	must(r.t, err)
	return reply
}

// poisoned has another process write to KUBE-FORWARD, and waits until canaryd has learned the
// rule.
func (r *rig) poisoned() {
	r.t.Helper()
	r.write(rules.Filter, "-A KUBE-FORWARD "+poison)
	r.after(10 * time.Second)
}

// wantSince fails unless the status counts that since the baseline.
func (r *rig) wantSince(when string, rules, chains, gone int) {
	r.t.Helper()
	b := r.d.Status().Baseline
	if b == nil || b.Error != "" || b.AppearedRules != rules || b.AppearedChains != chains || b.GoneRules != gone {
		r.t.Errorf("%s: the status says %+v; want %d rules in %d chains, and %d gone", when, b, rules, chains, gone)
	}
}

// TestPoisonedGeneration: a flush takes a rule that another process added to a protected chain or
// native table, and canaryd restores it as ever. Status, record and preview say that it is newer
// than the baseline, also after a restart. Nothing else happens to it.
func TestPoisonedGeneration(t *testing.T) {
	eachPoisoned(t, api.Heal, func(n *poisonedNode) {
		t := n.t
		none := n.baseline(api.BaselineRequest{})
		if none.Baseline != nil || len(none.Changes) > 0 || none.Present.ID != n.d.Status().Generation.ID || n.d.Status().Baseline != nil {
			t.Errorf("without a baseline: %+v, %+v", none, n.d.Status().Baseline)
		}
		confirmed := n.baseline(api.BaselineRequest{Confirm: true})
		clean := n.d.Status().Generation
		if b := confirmed.Baseline; b == nil || b.Generation != clean.ID || b.Rules != clean.Rules || b.Chains != clean.Chains || b.NativeTables != len(n.d.Status().Native) || confirmed.Replaced != nil {
			t.Errorf("confirmed: %+v, of %+v", confirmed, clean)
		}
		n.wantSince("once it is confirmed", 0, 0, 0)
		n.wantLog("A baseline was confirmed on request")

		n.poison()
		n.wantSince("once another process has written", 1, 1, 0)
		n.wantReady()
		if d := cmp.Diff([]api.BaselineChange{n.want}, n.baseline(api.BaselineRequest{}).Changes); d != "" {
			t.Errorf("what appeared (-want +got):\n%s", d)
		}

		flushed := func(when string) {
			t.Helper()
			seen := len(n.records(0))
			n.flush()
			n.after(10 * time.Second)
			if !n.back() {
				t.Errorf("%s: the learned rules are not back", when)
			}
			record := n.records(seen)[0]
			not := record.NotInBaseline
			if not == nil || not.Generation != clean.ID || not.Rules != 1 || not.More != 0 || not.Native != n.want.Native {
				t.Fatalf("%s: the record says %+v", when, not)
			}
			want := []api.ChainName{{Family: n.want.Family, Table: n.want.Table, Native: n.want.Native, Chain: n.want.Chain, Rules: 1}}
			if d := cmp.Diff(want, not.Chains); d != "" || record.Outcome != reload.Proved {
				t.Errorf("%s: %s, chains of the record (-want +got):\n%s", when, record.Outcome, d)
			}
			if told := n.full(record.ID); told.Flush.NotInBaseline == nil || told.Flush.NotInBaseline.Rules != 1 {
				t.Errorf("%s: the journal has %+v", when, told.Flush.NotInBaseline)
			}
		}
		flushed("a flush")
		text, err := json.Marshal(n.d.Status().Public())
		must(t, err)
		if s := string(text); !strings.Contains(s, `"appearedRules":1`) || strings.Contains(s, "SECRET") || strings.Contains(s, "203.0.113.7") || strings.Contains(s, hex.EncodeToString([]byte("SECRET"))) {
			t.Errorf("over TCP: %s", s)
		}
		for _, f := range n.d.Status().Public().Flushes {
			if not := f.NotInBaseline; not == nil || not.Rules != 1 || not.More != 1 || not.Chains != nil {
				t.Errorf("over TCP a record has %+v", not)
			}
		}

		n.restart()
		n.wantSince("after a restart", 1, 1, 0)
		flushed("a flush after a restart")

		forgotten := n.baseline(api.BaselineRequest{Forget: true})
		if forgotten.Replaced == nil || forgotten.Replaced.Generation != clean.ID || n.d.Status().Baseline != nil {
			t.Errorf("forgotten: %+v, the status has %+v", forgotten, n.d.Status().Baseline)
		}
		if _, err := n.setup().store.LoadBaseline(); !errors.Is(err, reload.ErrNothingStored) {
			t.Errorf("the file is still there: %v", err)
		}
		seen := len(n.records(0))
		n.flush()
		n.after(10 * time.Second)
		if not := n.records(seen)[0].NotInBaseline; not != nil {
			t.Errorf("without a baseline a record has %+v", not)
		}
	})
}

// restart ends the daemon and starts another one on the same kernel and state folder.
func (r *rig) restart(t *testing.T, backend iptables.Backend, dir string) {
	t.Helper()
	r.stop()
	*r = *run(t, r.fake, setup{store: openStore(t, dir, identity(backend)), journal: t.TempDir()})
	r.after(5 * time.Second)
}

// TestPreviewMarksWhatIsNotInTheBaseline: a preview of a restore lists the rules first that
// were never confirmed. A dry run of the lost native tables counts them.
func TestPreviewMarksWhatIsNotInTheBaseline(t *testing.T) {
	eachPoisoned(t, api.Observe, func(n *poisonedNode) {
		t := n.t
		n.after(5 * time.Second)
		clean := n.baseline(api.BaselineRequest{Confirm: true}).Baseline.Generation
		n.poison()
		n.after(5 * time.Second)
		poisoned := n.id()
		n.flush()
		n.after(time.Second)
		preview := n.restore(api.RestoreRequest{DryRun: true})
		n.wantPreview("of the lost rules", preview, clean)
		n.wantPreview("of a generation", n.restore(api.RestoreRequest{DryRun: true, Generation: poisoned}), clean)
		if not := n.records(0)[0].NotInBaseline; not == nil || not.Rules != 1 {
			t.Errorf("a record in observe mode has %+v", not)
		}
		if reply := n.restore(api.RestoreRequest{Agreed: preview.Agreement()}); !reply.Proved() {
			t.Errorf("nothing is refused for it: %+v", reply)
		}
		n.baseline(api.BaselineRequest{Forget: true})
		if preview := n.restore(api.RestoreRequest{DryRun: true, Generation: poisoned}); preview.Baseline != nil {
			t.Errorf("without a baseline: %+v", preview)
		}
	})
}

// TestConfirmWhatWasShown: an operator confirms by its ID the generation that he has seen,
// without the rules that another process added since. Only generations in memory or on disk can
// be confirmed.
func TestConfirmWhatWasShown(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{store: openStore(t, t.TempDir(), identity(backend))})
		r.after(5 * time.Second)
		shown := r.baseline(api.BaselineRequest{}).Present.ID
		r.poisoned()
		must(t, errorOf(r.d.Pause(t.Context(), api.PauseRequest{Seconds: 3600})))
		reply := r.baseline(api.BaselineRequest{Confirm: true, Generation: shown})
		if reply.Baseline.Generation != shown || reply.Baseline.AppearedRules != 1 || len(reply.Changes) != 1 {
			t.Errorf("confirmed: %+v", reply)
		}
		r.wantSince("in a pause", 1, 1, 0)
		present := r.baseline(api.BaselineRequest{Confirm: true, Generation: reply.Present.ID})
		if present.Replaced == nil || present.Replaced.Generation != shown || present.Baseline.AppearedRules != 0 {
			t.Errorf("confirmed next: %+v", present)
		}
		for _, bad := range []api.BaselineRequest{
			{Confirm: true, Generation: "0123456789ab"}, {Confirm: true, Generation: "../state"}, {Confirm: true, Forget: true}, {Generation: shown},
		} {
			if reply, err := r.d.Baseline(t.Context(), bad); err == nil {
				t.Errorf("%+v is answered with %+v", bad, reply)
			}
		}
		r.wantSince("after what was refused", 0, 0, 0)
		if got := r.baseline(api.BaselineRequest{}).Baseline.Generation; got != reply.Present.ID {
			t.Errorf("the baseline is %s, want %s", got, reply.Present.ID)
		}
	})
}

// TestBaselineThatIsBeingRead: until the file is read, the status says that it is being read,
// and not that there is no baseline.
func TestBaselineThatIsBeingRead(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		d, _ := choresWorld(t, backend)
		if b := d.Status().Baseline; b == nil || !b.Reading || b.Generation != "" {
			t.Errorf("before the loop runs: %+v", b)
		}
		st := d.newState()
		d.takeBaseline(t.Context(), st, d.loadBaseline())
		if d.publish(st); d.Status().Baseline != nil {
			t.Errorf("without a file: %+v", d.Status().Baseline)
		}
	})
}

func errorOf[T any](_ T, err error) error { return err }

// TestBaselineIsNotBelieved: canaryd reports a baseline file that is damaged, another user's,
// newer or too large. Nothing else changes: it starts, guards, and takes the next confirmation.
func TestBaselineIsNotBelieved(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"torn":      func(path string) error { return os.Truncate(path, 300) },
		"foreign":   func(path string) error { return os.Chown(path, 1234, 0) },
		"newer":     func(path string) error { return os.WriteFile(path, []byte(`{"format":99}`), 0o600) },
		"oversized": func(path string) error { return os.Truncate(path, 65<<20) },
	} {
		t.Run(name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				if name == "foreign" && os.Geteuid() != 0 {
					t.Skip("SKIPPED: only root can give a file to another user")
				}
				dir := t.TempDir()
				r := start(t, backend, setup{store: openStore(t, dir, identity(backend)), journal: t.TempDir()})
				r.baseline(api.BaselineRequest{Confirm: true})
				r.stop()
				must(t, spoil(filepath.Join(dir, "baseline.json")))
				r.restart(t, backend, dir)
				r.wantReady()
				r.wantLog("The confirmed baseline cannot be used")
				b := r.d.Status().Baseline
				if b == nil || b.Error == "" || b.Generation != "" || b.Rules != 0 || b.AppearedRules != 0 {
					t.Errorf("the status says %+v", b)
				}
				if public := r.d.Status().Public().Baseline; public == nil || strings.Contains(public.Error, dir) || public.Error == "" {
					t.Errorf("over TCP: %+v", public)
				}
				if reply := r.baseline(api.BaselineRequest{}); reply.Baseline == nil || reply.Baseline.Error == "" || len(reply.Changes) > 0 {
					t.Errorf("asked: %+v", reply)
				}
				if preview := r.restore(api.RestoreRequest{DryRun: true}); preview.Baseline == nil || preview.Baseline.Error == "" {
					t.Errorf("a preview: %+v", preview)
				}
				r.poisoned()
				r.flushNat()
				r.settled()
				if record := r.records(0)[0]; record.Outcome != reload.Proved || record.NotInBaseline != nil {
					t.Errorf("the record is %+v", record)
				}
				r.wantReady()
				reply := r.baseline(api.BaselineRequest{Confirm: true})
				if reply.Replaced == nil || reply.Replaced.Error == "" || reply.Baseline.Error != "" {
					t.Errorf("confirmed: %+v", reply)
				}
				r.wantSince("once it is replaced", 0, 0, 0)
			})
		})
	}
}

// TestBaselineOfManyChanges: an owner changes its rules all the time. Comparisons take 2 % of a
// core at most, and a request gets a present one.
func TestBaselineOfManyChanges(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{store: openStore(t, t.TempDir(), identity(backend))})
		r.baseline(api.BaselineRequest{Confirm: true})
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		var lines []string
		for i := range 700 {
			lines = append(lines, fmt.Sprintf("-A KUBE-FORWARD -s 10.9.%d.%d/32 -j ACCEPT", i/250, i%250))
		}
		r.write(rules.Filter, lines...)
		r.after(20 * time.Second)
		reply := r.baseline(api.BaselineRequest{})
		first := reply.Changes[0]
		for _, c := range reply.Changes {
			if c.Appeared != len(c.Rules)+c.More {
				t.Errorf("%s: %d appeared, %d are listed and %d more", c.Chain, c.Appeared, len(c.Rules), c.More)
			}
			if !c.Known && first.Chain != "KUBE-SERVICES" && first.Chain != "KUBE-FORWARD" {
				t.Errorf("a new chain stands before those that were confirmed: %+v", reply.Changes)
			}
			if c.Chain == "KUBE-FORWARD" && (c.Appeared != 700 || len(c.Rules) != baseline.LinesQuoted/10) {
				t.Errorf("KUBE-FORWARD: %d appeared, %d are listed", c.Appeared, len(c.Rules))
			}
		}
		if b := reply.Baseline; b.AppearedRules <= 700 || b.AppearedChains != len(reply.Changes) {
			t.Errorf("counted %+v in %d chains", b, len(reply.Changes))
		}
	})
}

// A nativeCounts counts the differences of native tables from a baseline.
type nativeCounts struct{ rules, parts, tables, goneRules, goneParts, goneTables int }

// TestBaselineOfNativeTables: rules and declarations count, and elements, handles and counters do
// not. A table that was never confirmed is one line, and so is a confirmed table that is gone.
func TestBaselineOfNativeTables(t *testing.T) {
	withSet := func(name string, elements ...native.Element) func(*native.Table) {
		return func(t *native.Table) { t.Sets = append(t.Sets, native.Set{Name: name, Elements: elements}) }
	}
	for _, test := range []struct {
		name string
		do   func(r *rig, k *fakeNative)
		want nativeCounts
		rows []string
	}{
		{"nothing", func(*rig, *fakeNative) {}, nativeCounts{}, nil},
		{"a rule", func(_ *rig, k *fakeNative) { k.addRule(proxyTable, "c") }, nativeCounts{rules: 1}, []string{"ip kube-proxy  services known +1 -0"}},
		{"a rule less", func(_ *rig, k *fakeNative) { k.removeRule(proxyTable) }, nativeCounts{goneRules: 1}, []string{"ip kube-proxy  services known +0 -1"}},
		{"the same rules with other handles", func(_ *rig, k *fakeNative) {
			k.change(proxyTable, func(t *native.Table) { t.Chains[1].Rules[0].Handle, t.Chains[1].Rules[1].Handle = 77, 78 })
		}, nativeCounts{}, nil},
		{"elements", func(_ *rig, k *fakeNative) {
			k.change(proxyTable, func(t *native.Table) { t.Sets[0].Elements = append(t.Sets[0].Elements, native.Element{9}) })
		}, nativeCounts{}, nil},
		{"a set", func(_ *rig, k *fakeNative) { k.change(proxyTable, withSet("evil")) }, nativeCounts{parts: 1}, []string{"ip kube-proxy set evil new +1 -0"}},
		{"another declaration of a set", func(_ *rig, k *fakeNative) {
			k.change(proxyTable, func(t *native.Table) {
				t.Sets[0].Attrs = nft.AppendAttr(nil, unix.NFTA_SET_KEY_TYPE, "\x00\x00\x00\x07", 0)
			})
		}, nativeCounts{parts: 1, goneParts: 1}, []string{"ip kube-proxy set ips known +1 -1"}},
		{"a chain, after the known ones", func(_ *rig, k *fakeNative) {
			k.change(proxyTable, func(t *native.Table) {
				t.Chains = append([]native.Chain{{Name: "evil", Rules: []native.Rule{ruleOf("x")}}}, t.Chains...)
				t.Chains[2].Rules = append(t.Chains[2].Rules, ruleOf("y"))
			})
		}, nativeCounts{rules: 2}, []string{"ip kube-proxy  services known +1 -0", "ip kube-proxy  evil new +1 -0"}},
		{"a base chain", func(_ *rig, k *fakeNative) {
			k.change(proxyTable, func(t *native.Table) { t.Chains = append(t.Chains, native.Chain{Name: "output", Base: true}) })
		}, nativeCounts{parts: 1}, []string{"ip kube-proxy base chain output new +1 -0"}},
		{"a table", func(_ *rig, k *fakeNative) { k.create(tableOf(inetTable, "x", "y")) }, nativeCounts{tables: 1}, []string{"inet firewalld table  new +3 -0"}},
		{"a table less", func(r *rig, k *fakeNative) {
			k.deleteTable(dockerTable)
			r.after(10 * time.Second)
			_, err := r.d.Dismiss(r.t.Context())
			must(r.t, err)
		}, nativeCounts{goneTables: 1}, []string{"ip docker-bridges table  known +0 -2"}},
		{"a table that is too large", func(_ *rig, k *fakeNative) {
			k.limit(20)
			k.change(proxyTable, func(t *native.Table) {
				for range 40 {
					t.Chains[1].Rules = append(t.Chains[1].Rules, ruleOf(strings.Repeat("x", 500)))
				}
			})
		}, nativeCounts{}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			proxy := tableOf(proxyTable, "a", "b")
			withSet("ips", native.Element{1})(proxy)
			k := newFakeNative(proxy, tableOf(dockerTable, "c"))
			nativeNode(t, setup{guarded: k, store: openStore(t, t.TempDir(), identity(iptables.NFT))}, func(t *testing.T, r *rig, k *fakeNative) {
				r.baseline(api.BaselineRequest{Confirm: true})
				test.do(r, k)
				r.after(10 * time.Second)
				if left := len(r.d.Status().NativeLeftOut); (left > 0) != strings.Contains(test.name, "too large") {
					t.Errorf("%d tables are left out", left)
				}
				b := r.d.Status().Baseline
				if got := (nativeCounts{b.AppearedRules, b.AppearedParts, b.AppearedTables, b.GoneRules, b.GoneParts, b.GoneTables}); got != test.want {
					t.Errorf("the status counts %+v, want %+v", got, test.want)
				}
				var rows []string
				for _, c := range r.baseline(api.BaselineRequest{}).Changes {
					rows = append(rows, fmt.Sprintf("%s %s %s %s +%d -%d", c.Name(), c.Kind, c.Chain, map[bool]string{true: "known", false: "new"}[c.Known], c.Appeared, c.Gone))
				}
				if d := cmp.Diff(test.rows, rows); d != "" {
					t.Errorf("changes (-want +got):\n%s", d)
				}
			})
		})
	}
}

// inetTable is a native table of another family.
var inetTable = tableid.Inet.Table("firewalld")

// change writes a table again, as its owner does.
func (k *fakeNative) change(id tableid.TableID, do func(*native.Table)) {
	next := *k.standing(id)
	next.Chains, next.Sets = slices.Clone(next.Chains), slices.Clone(next.Sets)
	for i := range next.Chains {
		next.Chains[i].Rules = slices.Clone(next.Chains[i].Rules)
	}
	do(&next)
	k.sync(&next)
}

// create makes a table that did not exist.
func (k *fakeNative) create(t *native.Table) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		k.put(t)
		deed(t.ID).Made = k.handle
	})
}

// TestBaselineOfAnOlderFile: an older canaryd confirmed no native table. Each is one line, and a
// flush record counts all of its lost rules. The next confirmation takes them in.
func TestBaselineOfAnOlderFile(t *testing.T) {
	dir := t.TempDir()
	k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
	s := setup{store: openStore(t, dir, identity(iptables.NFT)), journal: t.TempDir(), guarded: k}
	nativeNode(t, s, func(t *testing.T, r *rig, k *fakeNative) {
		r.baseline(api.BaselineRequest{Confirm: true})
		r.stop()
		file := filepath.Join(dir, "baseline.json")
		text, err := os.ReadFile(file)
		must(t, err)
		var old map[string]any
		must(t, json.Unmarshal(text, &old))
		delete(old, "native")
		delete(old, "sum")
		old["format"] = 2
		text, err = json.Marshal(old)
		must(t, err)
		must(t, os.WriteFile(file, text, 0o600))

		s.store = openStore(t, dir, identity(iptables.NFT))
		r = run(t, r.fake, s)
		r.after(10 * time.Second)
		if b := r.d.Status().Baseline; b.NativeTables != 0 || b.AppearedTables != 2 || b.AppearedRules != 0 || !b.Appeared() {
			t.Errorf("with the older file: %+v", b)
		}
		k.flushTable(proxyTable)
		r.after(10 * time.Second)
		not := r.records(0)[0].NotInBaseline
		if d := cmp.Diff([]api.ChainName{{Family: rules.IPv4, Table: proxyTable.Name, Native: true, Rules: 3}}, not.Chains); d != "" || not.Rules != 3 {
			t.Errorf("%d rules of the record, chains (-want +got):\n%s", not.Rules, d)
		}
		changes := r.baseline(api.BaselineRequest{}).Changes
		for _, c := range changes {
			if c.Kind != "table" || c.Known || len(c.Rules) > 0 || c.Appeared != c.More {
				t.Errorf("a change is %+v", c)
			}
		}
		if b := r.baseline(api.BaselineRequest{Confirm: true}).Baseline; len(changes) != 2 || b.NativeTables != 2 || b.Differs() {
			t.Errorf("%d changes; confirmed: %+v", len(changes), b)
		}
	})
}

// TestConfirmNativeGenerations: an operator confirms the IDs that he was shown. Tables without an
// ID among them keep their part of the baseline.
func TestConfirmNativeGenerations(t *testing.T) {
	natives := nativestore.New(t.TempDir(), nativestore.Identity{})
	nativeNode(t, setup{store: openStore(t, t.TempDir(), identity(iptables.NFT)), nativeStore: natives}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(5 * time.Second)
		shown := r.baseline(api.BaselineRequest{})
		if len(shown.Generations) != 3 || shown.NativeTables != 2 {
			t.Fatalf("shown: %+v", shown)
		}
		k.addRule(proxyTable, "poison")
		r.poisoned()
		ids := strings.Join(shown.Generations, ",")
		reply := r.baseline(api.BaselineRequest{Confirm: true, Generation: ids})
		if b := reply.Baseline; b.AppearedRules != 2 || b.AppearedChains != 2 || b.AppearedTables != 0 || b.NativeTables != 2 {
			t.Errorf("the poison is confirmed: %+v", b)
		}
		proxy := r.present(proxyTable)
		if b := r.baseline(api.BaselineRequest{Confirm: true, Generation: proxy[:8]}).Baseline; b.AppearedRules != 1 || b.NativeTables != 2 || b.Generation != shown.Present.ID {
			t.Errorf("one table is confirmed: %+v", b)
		}
		for _, bad := range []string{"0123456789ab", ids + ",0123456789ab", proxy + "," + shown.Generations[1] + "," + shown.Generations[2], ids + "," + shown.Present.ID, ids + ","} {
			if reply, err := r.d.Baseline(t.Context(), api.BaselineRequest{Confirm: true, Generation: bad}); err == nil {
				t.Errorf("%q is answered with %+v", bad, reply)
			}
		}
		r.baseline(api.BaselineRequest{Forget: true})
		b := r.baseline(api.BaselineRequest{Confirm: true, Generation: proxy}).Baseline
		if b.NativeTables != 1 || b.Rules != 0 || b.AppearedTables != 1 || b.AppearedRules != r.d.Status().Generation.Rules {
			t.Errorf("only one table is confirmed: %+v", b)
		}
	})
}

// TestBaselineBeforeNativeTablesAreRead: until the first read of native tables none of them counts
// as gone, and nothing can be confirmed.
func TestBaselineBeforeNativeTablesAreRead(t *testing.T) {
	dir := t.TempDir()
	nativeNode(t, setup{store: openStore(t, dir, identity(iptables.NFT))}, func(t *testing.T, r *rig, k *fakeNative) {
		r.baseline(api.BaselineRequest{Confirm: true})
		r.stop()
		k.breakDown(errNativeBroken)
		next := run(t, r.fake, setup{store: openStore(t, dir, identity(iptables.NFT)), guarded: k})
		next.after(10 * time.Second)
		if b := next.d.Status().Baseline; b == nil || b.Differs() || b.NativeTables != 2 {
			t.Errorf("before a read: %+v", b)
		}
		if reply, err := next.d.Baseline(t.Context(), api.BaselineRequest{Confirm: true}); err == nil {
			t.Errorf("before a read: confirmed %+v", reply)
		}
		k.breakDown(nil)
		next.after(time.Minute)
		if b := next.d.Status().Baseline; b.Differs() {
			t.Errorf("after a read: %+v", b)
		}
	})
}
