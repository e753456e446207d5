package reload

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A stager lets another process act between the stages of a restore, and fails stages.
type stager struct {
	recorder
	between func()
	before  func()               // runs before each restore, after its read
	fail    func(stage int) bool // a restore of that stage
}

type stagedSession struct {
	iptables.Session
	*stager
}

func (s *stager) Begin(ctx context.Context) (iptables.Session, error) {
	session, err := s.Beginner.Begin(ctx)
	return stagedSession{session, s}, err
}

func (s stagedSession) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	s.note("read %s", f)
	return s.Session.Read(ctx, f)
}

func (s stagedSession) Restore(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	s.note("restore %s", tablesOf(payloads))
	if s.before != nil {
		s.before()
	}
	return iptables.EachStage(payloads, func(stage int, p iptables.Payload) map[rules.Family]iptables.Written {
		if stage > 0 && s.between != nil {
			s.between()
		}
		if s.fail != nil && s.fail(stage) {
			return iptables.InStages([]iptables.Payload{p}, func(rules.Family, []iptables.Script) iptables.Written {
				return iptables.Written{Err: &iptables.RestoreError{Reason: iptables.ReasonOther, Exit: 4, Stderr: "no memory"}}
			})
		}
		return s.Session.Restore(ctx, p)
	})
}

// tablesOf returns the tables of IPv4 that are written, stage by stage.
func tablesOf(stages []iptables.Payload) string {
	var all []string
	for _, p := range stages {
		var names []string
		for _, script := range p[v4] {
			names = append(names, string(script.Table))
		}
		all = append(all, strings.Join(names, " "))
	}
	return strings.Join(all, ", then ")
}

func TestWhatDecidesIsWrittenFirst(t *testing.T) {
	slow, quick := Pace(time.Second), Pace(time.Nanosecond)
	const whole, staged = "restore mangle nat filter", "restore mangle filter, then nat"
	once := func(do func(n *testNode)) func(*testNode) func() {
		return func(n *testNode) func() { return sync.OnceFunc(func() { do(n) }) }
	}
	newer := func(n *testNode) { must(n.t, n.Bypassing().RestoreNoflush(v4, newHint)) }
	for _, tt := range []struct {
		name    string
		pace    Pace
		flush   func(n *testNode)        // nil: everything
		between func(n *testNode) func() // nil: nothing
		before  func(n *testNode) func() // nil: nothing
		fail    func(stage int) bool
		legacy  bool // on legacy, too
		want    []string
		outcome Outcome
	}{
		{
			name: "a quick replay is one restore", pace: quick, legacy: true,
			want: []string{"read ipv4", whole, "read ipv4"}, outcome: Proved,
		},
		{
			name: "a long one is two", pace: slow, legacy: true,
			want: []string{"read ipv4", staged, "read ipv4"}, outcome: Proved,
		},
		{
			name: "nat alone has no stages", pace: slow, legacy: true,
			flush: func(n *testNode) { must(n.t, n.Flush(v4, rules.Nat, "")) },
			want:  []string{"read ipv4", "restore nat", "read ipv4"}, outcome: Proved,
		},
		{
			name: "an owner writes between the stages: only nat is planned again", pace: slow, legacy: true,
			between: once(newer),
			want:    []string{"read ipv4", staged, "read ipv4", "restore nat", "read ipv4"}, outcome: Proved,
		},
		{
			name: "and once more before nat is written: what was lost of the others is in the result", pace: slow,
			between: once(newer),
			before: func(n *testNode) func() {
				restores := 0
				return func() {
					if restores++; restores == 2 {
						newer(n)
					}
				}
			},
			want: []string{"read ipv4", staged, "read ipv4", "restore nat", "read ipv4", "restore nat", "read ipv4"}, outcome: Proved,
		},
		{
			name: "filter is flushed again between the stages", pace: slow,
			between: once(func(n *testNode) { must(n.t, n.Bypassing().Flush(v4, rules.Filter, "")) }),
			want:    []string{"read ipv4", staged, "read ipv4", "restore filter, then nat", "read ipv4"}, outcome: Proved,
		},
		{
			name: "nat is refused: the others stay proved", pace: slow, legacy: true,
			fail: func(stage int) bool { return stage == 1 },
			// The second read shows that no other process wrote, and the third that nothing is left
			// but nat, which is skipped.
			want: []string{"read ipv4", staged, "read ipv4", "read ipv4"}, outcome: Partial,
		},
	} {
		for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			if backend == iptables.Legacy && !tt.legacy {
				continue
			}
			t.Run(fmt.Sprint(backend, "/", tt.name), func(t *testing.T) {
				n := newNode(t, backend, nodeText, v4)
				if tt.flush == nil {
					n.flushAll(v4)
				} else {
					tt.flush(n)
				}
				s := &stager{recorder: recorder{Beginner: n.Fake}, fail: tt.fail}
				if tt.between != nil {
					s.between = tt.between(n)
				}
				if tt.before != nil {
					s.before = tt.before(n)
				}
				n.replayer.Kernel, n.job.Pace = s, tt.pace
				result := n.heal()
				log := slices.DeleteFunc(s.log, func(step string) bool { return strings.Contains(step, "anyway") })
				if d := cmp.Diff(tt.want, log); d != "" {
					t.Errorf("steps (-want +got):\n%s", d)
				}
				n.outcome(result, v4, tt.outcome)
				if tt.outcome.Done() {
					n.marked(v4)
				}
				for _, table := range []rules.TableName{rules.Mangle, rules.Filter} {
					if tr := result[v4].Tables[table]; tt.flush == nil && (!tr.Proved || !tr.Replayed || !tr.Finding.Verdict.Loss()) {
						t.Errorf("%s is proved %t, replayed %t: %+v", table, tr.Proved, tr.Replayed, tr.Finding)
					}
				}
				if tr := result[v4].Tables[rules.Nat]; tr.Lost.Rules == 0 {
					t.Errorf("nothing is told as lost of nat")
				}
			})
		}
	}
}

// TestPace: replays that wrote many rules show how long one rule takes.
func TestPace(t *testing.T) {
	wrote := func(took time.Duration, rules4, rules6 int) Result {
		return Result{v4: {wroteRules: rules4, writing: took}, v6: {wroteRules: rules6, writing: took}}
	}
	for _, tt := range []struct {
		name   string
		before Pace
		result Result
		want   time.Duration // for 10,000 rules
	}{
		{"nothing is known yet", Pace(0), nil, 160 * time.Millisecond},
		{"few rules tell nothing", Pace(0), wrote(time.Second, 100, 100), 160 * time.Millisecond},
		{"many do, those of both families together", Pace(0), wrote(10*time.Millisecond, 400, 600), 100 * time.Millisecond},
		{"the last replay counts", Pace(time.Second), wrote(5*time.Millisecond, 1000, 0), 50 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.before.After(tt.result).Estimate(10_000); got != tt.want {
				t.Errorf("10,000 rules are estimated at %s, want %s", got, tt.want)
			}
		})
	}
}
