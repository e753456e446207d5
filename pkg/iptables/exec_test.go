package iptables

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// No child ever reads an endless text to its end.
type endless struct {
	ended chan error // gets the error that ended the writing
}

func (e endless) WriteTo(out io.Writer) (int64, error) {
	var written int64
	chunk := []byte(strings.Repeat("-A X -j ACCEPT\n", 1000))
	for {
		n, err := out.Write(chunk)
		written += int64(n)
		if err != nil {
			e.ended <- err
			return written, err
		}
	}
}

// A child ends before it has read everything. In each case run returns its exit
// code, and no process continues to write.
func TestAChildThatDoesNotReadToTheEnd(t *testing.T) {
	sh := lookUp("sh")
	for _, c := range []struct {
		name, script string
		exit         int
		failed       error
	}{
		{"it refuses what it reads", "head -n 100 >/dev/null; echo line 100 failed >&2; exit 2", 2, nil},
		{"it reads nothing", "exit 1", 1, nil},
		{"it is content", "head -c 1 >/dev/null", 0, nil},
		{"it closes its input and goes on", "exec <&-; sleep 0.1; exit 3", 3, nil},
		{"somebody else keeps its input open", "sleep 60 >/dev/null 2>&1 & exit 4", 4, nil},
		{"it is killed by its deadline", "sleep 86400", -1, context.DeadlineExceeded},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, timeout := endless{make(chan error, 1)}, time.Hour
			if c.failed != nil {
				timeout = 500 * time.Millisecond
			}
			res, err := command{path: sh, args: []string{"-c", c.script}, stdin: text, timeout: timeout}.run(t.Context())
			if res.exit != c.exit || !errors.Is(err, c.failed) {
				t.Errorf("exit code %d, %v; want %d, %v", res.exit, err, c.exit, c.failed)
			}
			select {
			case <-text.ended:
			default:
				t.Error("somebody still writes")
			}
		})
	}
	_, err := command{path: "/no/such", stdin: endless{}, timeout: time.Minute}.run(t.Context())
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing program: %v", err)
	}
}

// A text whose producer fails is reported, even if the child accepts its half.
func TestATextThatBreaksOff(t *testing.T) {
	broken := errors.New("broken off")
	text, w := io.Pipe()
	go func() {
		io.WriteString(w, "*nat\n")
		w.CloseWithError(broken)
	}()
	_, err := command{path: lookUp("cat"), stdin: readAll{text}, timeout: time.Minute}.run(t.Context())
	if !errors.Is(err, broken) {
		t.Errorf("run returns %v", err)
	}
}

type readAll struct{ io.Reader }

func (r readAll) WriteTo(out io.Writer) (int64, error) { return io.Copy(out, r.Reader) }

// iptables-restore stops at a bad line in the middle of a long text.
func TestARestoreThatIsRefusedHalfWay(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		script := Script{Table: rules.Filter, Declare: []string{"X"}}
		for i := range 60_000 {
			step := Step{Verb: Append, Chain: "X", Rule: rules.Rule{Spec: "-j ACCEPT", Target: "ACCEPT"}}
			if i == 100 {
				step.Rule.Spec = "--nonsense"
			}
			script.Steps = append(script.Steps, step)
		}
		before := runtime.NumGoroutine()
		s := begin(t, k)
		mustRead(t, s, family)
		written := s.Restore(t.Context(), Payload{family: {script}})[family]
		var refused *RestoreError
		if !errors.As(written.Err, &refused) || refused.Reason != ReasonParse || !strings.Contains(refused.Stderr, "103") {
			t.Errorf("error is %v, want the refusal of line 103", written.Err)
		}
		for runtime.NumGoroutine() > before { // the writing goroutines have ended, or end now
			runtime.Gosched()
		}
	})
}

func TestShelf(t *testing.T) {
	table := func(n int) rules.Ruleset {
		nat := rules.NewTable(rules.Nat)
		nat.Add(rules.Chain{Name: "X", Rules: make([]rules.Rule, n)})
		return rules.Ruleset{rules.Nat: nat}
	}
	full, more, half, flushed := table(10), table(11), table(6), table(0)
	now := time.Now()
	for _, c := range []struct {
		name string
		puts []rules.Ruleset
		wait time.Duration // before the last one
		want rules.Ruleset
	}{
		{"nothing", nil, 0, rules.Ruleset{}},
		{"the last one", []rules.Ruleset{full, more}, 0, more},
		{"a loss", []rules.Ruleset{full, half}, 0, half},
		{"a flush is remembered over", []rules.Ruleset{full, flushed}, 0, full},
		{"and over", []rules.Ruleset{full, flushed, flushed}, cacheLife, full},
		{"but not for ever", []rules.Ruleset{full, flushed}, cacheLife + 1, flushed},
		{"a table that is gone", []rules.Ruleset{full, {}}, cacheLife, full},
		{"and does not come back", []rules.Ruleset{full, {}}, cacheLife + 1, rules.Ruleset{}},
	} {
		s := newReadCache()
		for i, set := range c.puts {
			at := now
			if i == len(c.puts)-1 {
				at = at.Add(c.wait)
			}
			s.put(rules.IPv4, set, at)
		}
		if got := s.known(rules.IPv4)(rules.Nat); got != c.want[rules.Nat] {
			t.Errorf("%s: there are %d rules, want %d", c.name, got.RuleCount(), c.want[rules.Nat].RuleCount())
		}
		if got := s.known(rules.IPv6)(rules.Nat); got != nil {
			t.Errorf("%s: the other family has them too", c.name)
		}
	}
}

// Two reads of unchanged content return the same memory, even after a flush.
func TestReadsShareWhatDidNotChange(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		s := begin(t, k)
		const text = "*nat\n:X - [0:0]\n:Y - [0:0]\n-A X -j ACCEPT\n-A Y -p tcp -j ACCEPT\nCOMMIT\n"
		put := func() {
			mustRead(t, s, family)
			if _, err := write(t, s, family, scriptsOf(t, text)...); err != nil {
				t.Fatal(err)
			}
		}
		rulesOf := func(set rules.Ruleset, chain string) []rules.Rule { return set[rules.Nat].Chain(chain).Rules }
		put()
		before := mustRead(t, s, family).Tables
		if _, err := write(t, s, family, Script{Table: rules.Nat, Steps: []Step{{Verb: Flush, Chain: "X"}, {Verb: Flush, Chain: "Y"}}}); err != nil {
			t.Fatal(err)
		}
		put()
		if _, err := write(t, s, family, Script{Table: rules.Nat, Steps: []Step{{Verb: Append, Chain: "Y", Rule: rules.Rule{Spec: "-j RETURN", Target: "RETURN"}}}}); err != nil {
			t.Fatal(err)
		}
		after := mustRead(t, s, family).Tables
		if &rulesOf(before, "X")[0] != &rulesOf(after, "X")[0] {
			t.Error("a chain that did not change is in memory twice")
		}
		if got := len(rulesOf(before, "Y")); got != 1 {
			t.Errorf("an earlier read now has %d rules in Y", got)
		}
		if got := len(rulesOf(after, "Y")); got != 2 {
			t.Errorf("Y has %d rules, want 2", got)
		}
	})
}
