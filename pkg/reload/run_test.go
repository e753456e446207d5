package reload

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A recorder is a Beginner whose sessions record their reads and writes, and let another process
// act before each.
type recorder struct {
	Beginner
	log    []string
	before func(step string) // may be nil
}

type recorded struct {
	iptables.Session
	*recorder
}

func (r *recorder) Begin(ctx context.Context) (iptables.Session, error) {
	s, err := r.Beginner.Begin(ctx)
	return recorded{s, r}, err
}

func (r *recorder) note(format string, args ...any) {
	step := fmt.Sprintf(format, args...)
	if r.before != nil {
		r.before(step)
	}
	r.log = append(r.log, step)
}

func (r recorded) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	r.note("read %s", f)
	return r.Session.Read(ctx, f)
}

func (r recorded) Restore(ctx context.Context, stages ...iptables.Payload) map[rules.Family]iptables.Written {
	r.note("restore %s", families(stages))
	return r.Session.Restore(ctx, stages...)
}

func (r recorded) RestoreAnyway(ctx context.Context, stages ...iptables.Payload) map[rules.Family]iptables.Written {
	r.note("restore %s anyway", families(stages))
	return r.Session.RestoreAnyway(ctx, stages...)
}

// families returns how many tables of each family are written, stage by stage.
func families(stages []iptables.Payload) string {
	var all []string
	for _, p := range stages {
		var names []string
		for _, f := range rules.Families() {
			if scripts, ok := p[f]; ok {
				names = append(names, fmt.Sprintf("%s(%d)", f, len(scripts)))
			}
		}
		all = append(all, strings.Join(names, "+"))
	}
	return strings.Join(all, ", then ")
}

const newHint = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\n-A KUBE-IPTABLES-HINT -j RETURN\nCOMMIT\n"

func TestFamiliesAreWrittenTogether(t *testing.T) {
	const both = "restore ipv4(3)+ipv6(3)"
	twice := func(steps ...string) []string { return slices.Concat(steps, steps) }
	for _, tt := range []struct {
		name    string
		backend iptables.Backend
		// at is the step before which another process writes to IPv4, each time.
		at     string
		fail   bool // one restore of IPv4 is refused
		want   []string
		result map[rules.Family]Outcome
	}{
		{
			name: "nobody else writes", backend: iptables.NFT,
			want: []string{"read ipv4", "read ipv6", both, "read ipv4", "read ipv6"},
		},
		{
			name: "nobody else writes", backend: iptables.Legacy,
			want: []string{"read ipv4", "read ipv6", both, "read ipv4", "read ipv6"},
		},
		{
			name: "only the first read is stale", backend: iptables.NFT, at: "read ipv6",
			want: []string{
				"read ipv4", "read ipv6", both,
				"read ipv6",       // the proof
				"read ipv4",       // again
				"restore ipv4(3)", // the only family that is left
				"read ipv4",
			},
		},
		{
			name: "only one family is stale", backend: iptables.Legacy, at: both,
			want: []string{
				"read ipv4", "read ipv6", both, "read ipv6", "read ipv4", "restore ipv4(3)", "read ipv4",
			},
		},
		{
			name: "everything is stale, for ever", backend: iptables.NFT, at: both,
			want: slices.Concat(
				twice("read ipv4", "read ipv6", both), twice("read ipv4", "read ipv6", both),
				[]string{"read ipv4", "read ipv6", both, both + " anyway", "read ipv4", "read ipv6"}),
			result: map[rules.Family]Outcome{v4: Raced, v6: Raced},
		},
		{
			name: "a table of the first family is refused", backend: iptables.NFT, fail: true,
			// The number of commits is unknown, so the second family is read again.
			want: []string{
				"read ipv4", "read ipv6", both,
				"read ipv4", // whether another process wrote
				"read ipv6", "read ipv4", "restore ipv4(2)+ipv6(3)", "read ipv6", "read ipv4",
			},
			result: map[rules.Family]Outcome{v4: Partial, v6: Proved},
		},
		{
			name: "a table of the first family is refused", backend: iptables.Legacy, fail: true,
			want:   []string{"read ipv4", "read ipv6", both, "read ipv6", "read ipv4", "read ipv4", "restore ipv4(2)", "read ipv4"},
			result: map[rules.Family]Outcome{v4: Partial, v6: Proved},
		},
	} {
		t.Run(string(tt.backend)+"/"+tt.name, func(t *testing.T) {
			n := newNode(t, tt.backend, nodeText, v4, v6)
			n.flushAll(v4)
			n.flushAll(v6)
			if tt.fail {
				n.FailRestores(1, iptables.ReasonOther)
			}
			writes := 0
			r := &recorder{Beginner: n.Fake, before: func(step string) {
				if step == tt.at && (writes == 0 || tt.result != nil) {
					writes++
					must(t, n.Bypassing().RestoreNoflush(v4, strings.ReplaceAll(newHint, "RETURN", fmt.Sprintf("MARK --set-mark %d", writes))))
				}
			}}
			n.replayer.Kernel = r
			result := n.heal()
			// Other tests check the steps after the proofs.
			log := slices.DeleteFunc(r.log, func(step string) bool { return strings.HasSuffix(step, "(1) anyway") })
			if d := cmp.Diff(tt.want, log); d != "" {
				t.Errorf("steps (-want +got):\n%s", d)
			}
			for _, f := range rules.Families() {
				want, told := tt.result[f]
				if !told {
					want = Proved
				}
				n.outcome(result, f, want)
				if want.Done() {
					n.marked(f)
				}
			}
		})
	}
}

// TestOrderOfASection checks the order of a section. Jumps are deleted before their targets are
// rewritten, chains are complete before a rule leads to them, and the canary is last. So the canary
// is in force only if everything is.
func TestOrderOfASection(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	old := n.SaveTable(v4, rules.Nat)
	n.flushAll(v4)
	must(t, n.DeleteChains(v4, rules.Nat))
	must(t, n.Restore(v4, strings.NewReplacer("canaryd-canary:", "canaryd-canary:0", "KUBE-SVC-A", "KUBE-SVC-OLD").Replace(old)))
	n.heal()
	payload := n.Payloads(v4)[1] // the first one was planted
	_, nat, _ := strings.Cut(payload, "*nat\n")
	nat, _, _ = strings.Cut(nat, "COMMIT")
	nonce := string(n.job.Marks[v4.Table(rules.Nat)].Nonce)
	var got []string
	for line := range strings.Lines(nat) {
		line = strings.ReplaceAll(strings.TrimSpace(line), nonce, "NEW")
		if strings.HasPrefix(line, "-D") { // of marks, by the nonce of that time
			line, _, _ = strings.Cut(line, " -m comment")
		}
		got = append(got, line)
	}
	want := []string{
		":KUBE-SVC-A - [0:0]", ":KUBE-SERVICES - [0:0]", ":KUBE-CANARYD-CANARY - [0:0]",
		"-D PREROUTING", "-D OUTPUT", "-D POSTROUTING",
		`-A KUBE-SERVICES -p tcp -m comment --comment "ns/a\'s port" -j KUBE-SVC-A`,
		"-A KUBE-SVC-A -j KUBE-MARK-MASQ",
		"-F KUBE-SVC-OLD", "-X KUBE-SVC-OLD",
		`-A PREROUTING -m comment --comment "canaryd-witness:NEW"`, `-A OUTPUT -m comment --comment "canaryd-witness:NEW"`,
		`-A POSTROUTING -m comment --comment "canaryd-witness:NEW"`,
		`-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:NEW"`,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("nat's section (-want +got):\n%s", d)
	}
}

// TestNoCopyOfTheText: composing and writing the rules of 5,000 services takes less memory than
// their text.
func TestNoCopyOfTheText(t *testing.T) {
	task := tableTask{table: rules.Nat, known: true, seen: canary.Seen{Table: rules.NewTable(rules.Nat)}}
	task.want.CanaryChain = canary.DefaultChain
	for i := range 16_000 {
		c := rules.Chain{Name: fmt.Sprintf("KUBE-SEP-%016d", i)}
		for j := range 3 {
			spec := fmt.Sprintf(`-s 10.%d.%d.%d/32 -m comment --comment "namespace-%d/service-%d:http" -j KUBE-MARK-MASQ`, i>>8, i&255, j, i%9, i)
			c.Rules = append(c.Rules, rules.Rule{Spec: spec, Target: "KUBE-MARK-MASQ"})
		}
		task.want.Section.Chains = append(task.want.Section.Chains, c)
	}
	task.finding = canary.Judge(task.want, task.seen)
	task.finding.Verdict, task.finding.MarkLost = canary.TableDeleted, true
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	plan := composeReplay(task, canary.NewNonce())
	text, err := plan.script.WriteTo(io.Discard)
	runtime.ReadMemStats(&after)
	must(t, err)
	lines := len(plan.script.Declare) + len(plan.script.Steps)
	if lines < 62_590 {
		t.Fatalf("only %d lines", lines)
	}
	took := after.TotalAlloc - before.TotalAlloc
	t.Logf("%d lines, %d bytes of text, %d bytes allocated", lines, text, took)
	if took >= uint64(text) {
		t.Errorf("%d bytes were allocated for %d bytes of text", took, text)
	}
}
