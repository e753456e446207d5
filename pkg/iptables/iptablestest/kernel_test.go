package iptablestest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestFakeLikeKernel: a test runs the same reads and sessions with a Fake and the real Kernel;
// all answers must be equal.
func TestFakeLikeKernel(t *testing.T) {
	for _, backend := range backends {
		t.Run(string(backend), func(t *testing.T) {
			nstest.NeedProgram(t, "iptables-"+string(backend))
			nstest.Run(t, func(t *testing.T) {
				// The Fake is like the text path.
				k, err := iptables.Open(t.Context(), iptables.Config{Backend: backend, Replay: iptables.ReplayText})
				must(t, err)
				defer func() { must(t, k.Close()) }()
				// A real foreign writer with another lock file, like Bypassing.
				foreign := func(family rules.Family, text string) {
					nstest.CommandInput(t, text, "env", "XTABLES_LOCKFILE=/run/other.lock", tool(backend, family, "restore"), "--noflush")
				}
				f := iptablestest.NewFake(backend)
				want := answers(t, k, foreign)
				got := answers(t, f, func(family rules.Family, text string) { must(t, f.Bypassing().RestoreNoflush(family, text)) })
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("answers (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// kernel has the methods that answers calls.
type kernel interface {
	Stamp(context.Context, rules.Family) (iptables.Stamp, error)
	ProbeOnly(context.Context, rules.Family, []iptables.Place) (iptables.Probed, error)
	Probe(context.Context, rules.Family, []iptables.Place) (iptables.Probed, error)
	Read(context.Context, rules.Family) (iptables.Snapshot, error)
	Begin(context.Context) (iptables.Session, error)
}

// answers runs one script and returns the answers at each step.
func answers(t *testing.T, k kernel, foreign func(rules.Family, string)) []string {
	t.Helper()
	var log []string
	say := func(format string, args ...any) { log = append(log, fmt.Sprintf(format, args...)) }
	var last iptables.Stamp
	var digest uint64
	look := func(after string) {
		stamp, err := k.Stamp(t.Context(), v4)
		must(t, err)
		probed, err := k.Probe(t.Context(), v4, []iptables.Place{
			{Table: rules.Nat, Chain: "CANARY"}, {Table: rules.Nat, Chain: "SVC"}, {Table: rules.Nat, Chain: "INPUT"},
			{Table: rules.Nat, Chain: "OUTPUT"}, {Table: rules.Filter, Chain: "OURS"}, {Table: rules.Filter, Chain: "INPUT"},
		})
		must(t, err)
		snap, err := k.Read(t.Context(), v4)
		must(t, err)
		say("%s: stamp moved %v, exact %v; digest moved %v, agrees %v", after,
			stamp != last, stamp.Exact, probed.Digest != digest, snap.Digest == probed.Digest)
		say("urgent %v", stamp.Urgent(last))
		only, err := k.ProbeOnly(t.Context(), v4, []iptables.Place{{Table: rules.Nat, Chain: "CANARY"}})
		must(t, err)
		say("only %v", only.Holdings)
		last, digest = stamp, probed.Digest
		say("%v", probed.Holdings)
		for _, name := range rules.AllTables() {
			if table := snap.Tables[name]; table != nil {
				say("%s: %v", name, table.Chains)
			}
		}
	}
	look("at first")
	foreign(v4, canaryText)
	look("planted")
	foreign(v6, "*nat\n:CANARY - [0:0]\nCOMMIT\n")
	look("the other family")
	foreign(v4, "*nat\n:SVC - [0:0]\n-A SVC -s 10.0.0.2 -j RETURN\nCOMMIT\n")
	look("rule replaced")
	foreign(v4, "*nat\n:SVC - [0:0]\n-A SVC -s 10.0.0.2 -j RETURN\nCOMMIT\n")
	look("rule replaced by itself")
	foreign(v4, "*nat\n-F INPUT\nCOMMIT\n")
	look("nothing flushed")
	foreign(v4, "*nat\n-F\nCOMMIT\n")
	look("flushed")
	foreign(v4, canaryText)
	foreign(v4, "*nat\n-C OUTPUT -j SVC\nCOMMIT\n")
	look("checked")

	session, err := k.Begin(t.Context())
	must(t, err)
	sayWritten := func(w iptables.Written) {
		var refused *iptables.RestoreError
		switch {
		case errors.As(w.Err, &refused):
			say("refused %v: %s %s exit %d", w.Raced, refused.Reason, refused.Program, refused.Exit)
		default:
			say("raced %v, stale %v, other error %v", w.Raced, errors.Is(w.Err, nft.ErrStale), w.Err != nil && !errors.Is(w.Err, nft.ErrStale))
		}
	}
	restore := func(family rules.Family, text string) {
		sayWritten(session.Restore(t.Context(), iptables.Payload{family: mustParseScripts(t, text)})[family])
	}
	restoreBoth := func(what string, do func(context.Context, ...iptables.Payload) map[rules.Family]iptables.Written, text4, text6 string) {
		say("%s of both:", what)
		written := do(t.Context(), iptables.Payload{v4: mustParseScripts(t, text4), v6: mustParseScripts(t, text6)})
		sayWritten(written[v4])
		sayWritten(written[v6])
	}
	restoreStaged := func(what string, first4, second4, second6 string) {
		say("%s in two stages:", what)
		written := session.Restore(t.Context(), iptables.Payload{v4: mustParseScripts(t, first4)},
			iptables.Payload{v4: mustParseScripts(t, second4), v6: mustParseScripts(t, second6)})
		for _, f := range rules.Families() {
			say("%d stages", written[f].Stages)
			sayWritten(written[f])
		}
	}
	restore(v4, filterText) // not read
	read(t, session, v4)
	read(t, session, v6)
	restore(v4, filterText+mangleText)
	restore(v6, filterText)
	restore(v4, filterText)
	look("three restores")
	foreign(v4, "*raw\n:FOREIGN - [0:0]\nCOMMIT\n")
	restore(v4, filterText)
	restore(v6, filterText)
	read(t, session, v4)
	for _, line := range []string{"-A OURS -j NOPE", "-A NOPE -j OURS", "-C OURS -j ACCEPT", "-A OURS --nonsense", "-I OURS 9 -j ACCEPT", "-X OURS", "-A OURS -g NOPE", "-A OURS garbage"} {
		restore(v4, mangleText+"*filter\n"+line+"\nCOMMIT\n")
		restore(v4, filterText) // after a failure
		read(t, session, v4)
	}
	const more = "*filter\n-A OURS -s 10.1.1.1 -j RETURN\nCOMMIT\n"
	const refused = "*filter\n-A OURS -j NOPE\nCOMMIT\n"
	restoreBoth("one not read", session.Restore, more, filterText)
	restoreBoth("again", session.Restore, more, filterText)
	read(t, session, v6)
	restoreBoth("both read", session.Restore, filterText+mangleText, filterText)
	restoreBoth("again", session.Restore, more, mangleText)
	restoreBoth("the first refused", session.Restore, refused, filterText)
	read(t, session, v4)
	read(t, session, v6)
	restoreBoth("the second refused", session.Restore, filterText, mangleText+refused)
	restoreBoth("again", session.Restore, filterText, filterText)
	restoreBoth("anyway", session.RestoreAnyway, filterText, filterText)
	restoreBoth("after that", session.Restore, filterText, filterText)
	look("both")
	read(t, session, v4)
	read(t, session, v6)
	restoreStaged("all", filterText, mangleText, mangleText)
	restoreStaged("all again", more, filterText, filterText)
	restoreStaged("the second refused", mangleText, refused, filterText)
	restoreStaged("nothing read since", mangleText, mangleText, mangleText)
	read(t, session, v4)
	read(t, session, v6)
	restoreStaged("the first refused", refused, mangleText, filterText)
	look("stages")
	must(t, session.Close())
	must(t, session.Close())
	_, err = session.Read(t.Context(), v4)
	say("closed: %v", err)
	restoreBoth("closed", session.Restore, filterText, filterText)
	restoreBoth("closed, anyway", session.RestoreAnyway, filterText, filterText)
	look("at last")
	return log
}
