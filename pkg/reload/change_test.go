package reload

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// newer has rules that owners wrote after nodeText, and the deletion of one jump.
const newer = "*nat\n:KUBE-SVC-A - [0:0]\n:KUBE-SVC-B - [0:0]\n-A KUBE-SVC-A -j KUBE-SVC-B\n-A KUBE-SVC-B -j RETURN\n" +
	"-I OUTPUT -j KUBE-SVC-B\n-D PREROUTING -j KUBE-SERVICES\nCOMMIT\n"

// lines returns the rules and chains of iptables-save, without canaryd's marks.
func (n *testNode) lines(f rules.Family) []string {
	var list []string
	for line := range strings.Lines(n.content(f)) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), " [")
		list = append(list, line)
	}
	return list
}

// said returns a part in the form of lines.
func said(p Part) []string {
	list := []string{}
	for _, name := range p.Chains {
		list = append(list, ":"+name+" -")
	}
	for _, r := range p.Rules {
		list = append(list, r.String())
	}
	slices.Sort(list)
	return list
}

// less returns the lines that a has and b lacks.
func less(a, b []string) []string {
	list := []string{}
	for _, line := range a {
		if !slices.Contains(b, line) {
			list = append(list, line)
		}
	}
	slices.Sort(list)
	return list
}

// TestPreview: a preview writes nothing, and shows exactly the changes that Force makes afterwards.
func TestPreview(t *testing.T) {
	for name, meddle := range map[string]func(t *testing.T, n *testNode){
		"nothing":   func(*testing.T, *testNode) {},
		"newer":     func(t *testing.T, n *testNode) { must(t, n.RestoreNoflush(v4, newer)) },
		"flushed":   func(_ *testing.T, n *testNode) { n.flushAll(v4) },
		"rule gone": func(t *testing.T, n *testNode) { must(t, n.RestoreNoflush(v4, "*filter\n-F KUBE-FORWARD\nCOMMIT\n")) },
		"chain held": func(t *testing.T, n *testNode) { // a rule of others leads into it: it stays
			must(t, n.RestoreNoflush(v4, "*nat\n:KUBE-SVC-C - [0:0]\n-A KUBE-SVC-C -j RETURN\n-A corp -j KUBE-SVC-C\nCOMMIT\n"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, n *testNode) {
				meddle(t, n)
				whole, before := n.Save(v4), n.lines(v4)
				preview, err := n.replayer.PreviewForce(t.Context(), n.job)
				must(t, err)
				if d := cmp.Diff(whole, n.Save(v4)); d != "" || len(preview.Unread) > 0 {
					t.Fatalf("a preview wrote, or could not read %v (-before +now):\n%s", preview.Unread, d)
				}
				n.job.Check = preview.Changes.agreement().Check
				result, err := n.replayer.Force(t.Context(), n.job)
				must(t, err)
				n.outcome(result, v4, Proved)
				var added, removed []string
				for _, table := range protect.Always() {
					if d := cmp.Diff(preview.Changes[v4.Table(table)], result[v4].Tables[table].Changed); d != "" {
						t.Errorf("%s: another change than was shown (-shown +done):\n%s", table, d)
					}
					added = append(added, said(preview.Changes[v4.Table(table)].Added)...)
					removed = append(removed, said(preview.Changes[v4.Table(table)].Removed)...)
				}
				slices.Sort(added)
				slices.Sort(removed)
				after := n.lines(v4)
				if d := cmp.Diff(less(before, after), removed, cmp.Transformer("", slices.Clone[[]string])); len(removed)+len(less(before, after)) > 0 && d != "" {
					t.Errorf("removed (-in the kernel +told):\n%s", d)
				}
				if d := cmp.Diff(less(after, before), added, cmp.Transformer("", slices.Clone[[]string])); len(added)+len(less(after, before)) > 0 && d != "" {
					t.Errorf("added (-in the kernel +told):\n%s", d)
				}
			})
		})
	}
}

// TestNothingIsRemovedThatWasNotAgreedTo: Force writes nothing at all without an agreement, or with
// an agreement to fewer removals.
func TestNothingIsRemovedThatWasNotAgreedTo(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.RestoreNoflush(v4, newer))
		preview, err := n.replayer.PreviewForce(t.Context(), n.job)
		must(t, err)
		for name, agreed := range map[string]Agreement{"none": nil, "for less": preview.Changes.agreement()} {
			if agreed != nil {
				must(t, n.RestoreNoflush(v4, "*nat\n:KUBE-SVC-D - [0:0]\n-A KUBE-SVC-D -j RETURN\nCOMMIT\n"))
			}
			before := n.Save(v4) + n.Save(v6)
			n.job.Check = agreed.Check
			result, err := n.replayer.Force(t.Context(), n.job)
			must(t, err)
			if fr := result[v4]; fr.Outcome != Failed || !errors.Is(fr.Err, ErrNotAgreed) || len(fr.Tables) > 0 {
				t.Errorf("%s: %s, %v, tables %v", name, fr.Outcome, fr.Err, slices.Collect(maps.Keys(fr.Tables)))
			}
			if d := cmp.Diff(before, n.Save(v4)+n.Save(v6)); d != "" {
				t.Errorf("%s: written all the same (-before +now):\n%s", name, d)
			}
		}
		must(t, n.RestoreNoflush(v4, "*nat\n-F KUBE-SVC-D\n-X KUBE-SVC-D\nCOMMIT\n"))
		n.job.Check = preview.Changes.agreement().Check
		result, err := n.replayer.Force(t.Context(), n.job)
		must(t, err)
		n.take(result)
		n.outcome(result, v4, Proved)
		n.same(v4)
	})
}

// TestTheAgreementHoldsForWhatIsWritten: another process writes between the guarded read and the
// write. On nft the write is stale then, and the next read shows more removals than the agreement
// has. On legacy the lock keeps the other process out.
func TestTheAgreementHoldsForWhatIsWritten(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	must(t, n.RestoreNoflush(v4, newer))
	preview, err := n.replayer.PreviewForce(t.Context(), n.job)
	must(t, err)
	n.job.Check = preview.Changes.agreement().Check
	const late = "*nat\n:KUBE-SVC-D - [0:0]\n-A KUBE-SVC-D -j RETURN\nCOMMIT\n"
	n.meddle(1, func() { must(t, n.RestoreNoflush(v4, late)) })
	result, err := n.replayer.Force(t.Context(), n.job)
	must(t, err)
	if !errors.Is(result[v4].Err, ErrNotAgreed) {
		t.Errorf("%s, %v", result[v4].Outcome, result[v4].Err)
	}
	for _, line := range []string{"-A KUBE-SVC-D -j RETURN", "-A KUBE-SVC-B -j RETURN"} {
		if !strings.Contains(n.Save(v4), line) {
			t.Errorf("%s is gone", line)
		}
	}
}

// TestACheckedWriteIsNeverUnguarded: another process writes between each read and its write. A
// checked job writes nothing in the end, and an unchecked job is raced.
func TestACheckedWriteIsNeverUnguarded(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	n.flushAll(v4)
	write := func() { must(t, n.RestoreNoflush(v4, "*nat\n-F corp\n-A corp -j RETURN\nCOMMIT\n")) }
	n.meddle(1000, write)
	before := n.Save(v4)
	n.job.Check = Agreement(nil).Check
	result, err := n.replayer.Force(t.Context(), n.job)
	must(t, err)
	if result[v4].Outcome != Failed || !errors.Is(result[v4].Err, nft.ErrStale) || n.Save(v4) == "" {
		t.Errorf("%s, %v", result[v4].Outcome, result[v4].Err)
	}
	if strings.Contains(n.Save(v4), "-A KUBE-SVC-A") || !strings.Contains(before, canary.DefaultChain) {
		t.Errorf("written without a guard:\n%s", n.Save(v4))
	}
	n.meddle(2*staleReads, write)
	result, err = n.replayer.Force(t.Context(), n.job)
	must(t, err)
	n.outcome(result, v4, Proved)
}
