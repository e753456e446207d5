package iptables

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/versions"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

const payload = "*mangle\n:X - [0:0]\n-A X -m comment --comment one\nCOMMIT\n*nat\n:X - [0:0]\n-A X -j ACCEPT\nCOMMIT\n"

func otherFamily(family rules.Family) rules.Family {
	if family == rules.IPv4 {
		return rules.IPv6
	}
	return rules.IPv4
}

func wantRestore(t *testing.T, s Session, family rules.Family, payload string, wantRaced bool, wantErr error) {
	t.Helper()
	raced, err := write(t, s, family, scriptsOf(t, payload)...)
	if raced != wantRaced || !errors.Is(err, wantErr) {
		t.Errorf("Restore returns %t, %v; want %t, %v", raced, err, wantRaced, wantErr)
	}
}

func TestSessionOwnWritesAreNotStale(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		s := begin(t, k)
		wantRestore(t, s, family, payload, false, nft.ErrStale) // never read
		mustRead(t, s, family)
		mustRead(t, s, otherFamily(family))
		wantRestore(t, s, family, payload, false, nil)
		wantRestore(t, s, otherFamily(family), payload, false, nil)
		wantRestore(t, s, family, payload, false, nil)
		place := Place{Table: rules.Mangle, Chain: "X"}
		want := map[Place]Holding{place: {Presence: Present, Rules: 1, Comments: []string{"one"}}}
		if diff := cmp.Diff(want, mustProbe(t, k, family, place).Holdings); diff != "" {
			t.Errorf("after the restore (-want +got):\n%s", diff)
		}
	})
}

func TestSessionStale(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		iptablesCommand(t, backend, family, "-N FOREIGN")
		iptablesCommand(t, backend, family, "-A FOREIGN -p tcp --dport 1")
		s := begin(t, k)
		mustRead(t, s, family)
		// A process that moves the lock bypasses a legacy session.
		nstest.Command(t, "env", "XTABLES_LOCKFILE=/run/another.lock", program(backend, family, ""), "-R", "FOREIGN", "1", "-p", "tcp", "--dport", "2")
		wantRestore(t, s, family, payload, false, nft.ErrStale)
		if got := mustProbe(t, k, family, Place{Table: rules.Mangle, Chain: "X"}).Holdings[Place{Table: rules.Mangle, Chain: "X"}]; got.Presence == Present {
			t.Error("a stale restore wrote")
		}
		mustRead(t, s, family)
		wantRestore(t, s, family, payload, false, nil)
	})
}

// TestSessionByMarks: another process commits after the read. A script that is guarded by the
// marks that it deletes is written, unless one is gone before it is encoded or sent. Then it is
// stale, and no program is run for it.
func TestSessionByMarks(t *testing.T) {
	for _, test := range []struct {
		name          string
		before, since string // commands after the read, and after the encoding; "": none
		want          error
	}{
		{"no other commit", "", "", nil},
		{"another table", "add table ip foreign", "add table ip6 foreign", nil},
		{"another rule", "add rule ip mangle X counter", "insert rule ip mangle X counter", nil},
		{"the mark is gone before", "flush chain ip mangle X", "", nft.ErrStale},
		{"the mark is gone since", "", "flush chain ip mangle X", nft.ErrStale},
		{"the table is gone since", "", "flush ruleset", nft.ErrStale},
		{"another like it since", "", "flush chain ip mangle X; add rule ip mangle X counter", nft.ErrStale},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft", "nft")
				marked := `*mangle
:X - [0:0]
-A X -m comment --comment "canaryd-canary:1"
COMMIT
`
				nstest.CommandInput(t, marked, "iptables-nft-restore")
				k := openKernel(t, Config{Backend: NFT})
				standInRestore(t, k, rules.IPv4, "exit 7")
				s := begin(t, k).(*genidSession)
				mustRead(t, s, rules.IPv4)
				old := scriptsOf(t, marked)[0].Steps[0].Rule
				next, err := rules.ParseRule(strings.Replace(old.Spec, ":1", ":2", 1))
				if err != nil {
					t.Fatal(err)
				}
				due := Payload{rules.IPv4: {{Table: rules.Mangle, ByMarks: true, Steps: []Step{
					{Verb: Delete, Chain: "X", Rule: old}, {Verb: Append, Chain: "X", Rule: next},
				}}}}
				run := func(commands string) {
					if commands != "" {
						nstest.Command(t, "nft", commands)
					}
				}
				run(test.before)
				encode := func(due Payload) *directBatch {
					batch := k.encode(due)
					run(test.since)
					return batch
				}
				written := s.write(t.Context(), due, encode, false, false)[rules.IPv4]
				if !errors.Is(written.Err, test.want) || len(written.Direct) == 0 != (test.want != nil) {
					t.Errorf("written: %+v, want the error %v", written, test.want)
				}
				place := Place{Table: rules.Mangle, Chain: "X"}
				if got := mustProbe(t, k, rules.IPv4, place).Holdings[place].Comments; slices.Contains(got, "canaryd-canary:2") != (test.want == nil) {
					t.Errorf("comments %q", got)
				}
			})
		})
	}
}

// standInRestore replaces iptables-restore by a script in which $RESTORE is the
// real program.
func standInRestore(t *testing.T, k *Kernel, family rules.Family, script string) {
	t.Helper()
	path := t.TempDir() + "/restore"
	tools := k.tools[family]
	script = "#!/bin/bash\nRESTORE=" + tools.restore + "\n" + script + "\n"
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	tools.restore = path
	k.tools[family] = tools
}

// passTrials is for standInRestore: the real program writes chains of texts, and
// the rest of the script gets only the write.
const passTrials = `cat >"$0.in"; grep -q ` + TextChain + ` "$0.in" && exec "$RESTORE" "$@" <"$0.in"; exec <"$0.in"; `

func TestSessionRaced(t *testing.T) {
	for _, c := range []struct{ name, script string }{
		{"before", "nft add table ip foreign && exec $RESTORE \"$@\""},
		{"after", "$RESTORE \"$@\" && nft add table ip6 foreign"},
	} {
		t.Run(c.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft", "nft")
				k := openKernel(t, Config{Backend: NFT, Replay: ReplayText})
				standInRestore(t, k, rules.IPv4, passTrials+c.script)
				s := begin(t, k)
				mustRead(t, s, rules.IPv4)
				mustRead(t, s, rules.IPv6)
				wantRestore(t, s, rules.IPv4, payload, true, nil)
				wantRestore(t, s, rules.IPv4, payload, false, nft.ErrStale)
				wantRestore(t, s, rules.IPv6, payload, false, nft.ErrStale)
			})
		})
	}
}

// The first section is committed before the second is refused.
func TestSessionAfterRefusal(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		s := begin(t, k)
		mustRead(t, s, family)
		_, err := write(t, s, family, scriptsOf(t, "*nat\n:X - [0:0]\n-A X\nCOMMIT\n*filter\n:INPUT ACCEPT\n-A INPUT -j NOPE\nCOMMIT\n")...)
		var refused *RestoreError
		if !errors.As(err, &refused) || refused.Reason != ReasonMissingChain {
			t.Fatalf("error is %v", err)
		}
		wantRestore(t, s, family, payload, false, nft.ErrStale)
		mustRead(t, s, family)
		wantRestore(t, s, family, payload, false, nil)
	})
}

// TestSessionStages: stages are written one after the other, each under guard. A
// writer between two stages makes only the later stage stale.
func TestSessionStages(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		stage := func(table, source string) Payload {
			scripts := scriptsOf(t, "*"+table+"\n:X - [0:0]\n-A X -m comment --comment \""+source+"\"\nCOMMIT\n")
			scripts[0].AsText = strings.HasPrefix(source, "by-text")
			return Payload{family: scripts}
		}
		comments := func(table rules.TableName) []string {
			place := Place{Table: table, Chain: "X"}
			return mustProbe(t, k, family, place).Holdings[place].Comments
		}
		s := begin(t, k)
		mustRead(t, s, family)
		w := s.Restore(t.Context(), stage("filter", "canaryd-1"), stage("nat", "canaryd-2"))[family]
		if w.Err != nil || w.Raced || w.Stages != 2 {
			t.Fatalf("two stages: %+v", w)
		}
		if diff := cmp.Diff([][]string{{"canaryd-1"}, {"canaryd-2"}}, [][]string{comments(rules.Filter), comments(rules.Nat)}); diff != "" {
			t.Errorf("after two stages (-want +got):\n%s", diff)
		}

		// The stand-in writes the first stage, and then lets another process
		// write.
		standInRestore(t, k, family, passTrials+`"$RESTORE" "$@" && XTABLES_LOCKFILE=/run/another.lock `+program(backend, family, "")+` -w 5 -t mangle -N FOREIGN$$`)
		w = s.Restore(t.Context(), stage("filter", "by-text"), stage("nat", "canaryd-3"))[family]
		want := Written{Stages: 1, Err: nft.ErrStale, Raced: true, Detour: w.Detour}
		if backend == Legacy {
			// It reads the tables after the restore, including the foreign chain.
			want = Written{Stages: 2}
		}
		if diff := cmp.Diff(want, w, cmpopts.EquateErrors(), cmpopts.IgnoreFields(Written{}, "At", "Kernel")); diff != "" {
			t.Errorf("somebody writes between two stages (-want +got):\n%s", diff)
		}
		if backend == Legacy {
			return
		}

		// Without a guard the second stage may not match the state before the
		// first: the rule at the place of the insertion was deleted.
		standInRestore(t, k, family, passTrials+program(backend, family, "")+` -w 5 -t nat -F X && "$RESTORE" "$@"`)
		insert := Payload{family: {{Table: rules.Nat, Steps: []Step{{Verb: Insert, Chain: "X", Index: 1, Rule: rules.Rule{Spec: `-m comment --comment "canaryd-4"`}}}}}}
		w = s.RestoreAnyway(t.Context(), stage("filter", "by-text-too"), insert)[family]
		if diff := cmp.Diff([]rules.TableName{rules.Nat}, w.Direct); diff != "" || w.Err != nil {
			t.Errorf("another process empties a chain between two stages: %v, written directly (-want +got):\n%s%v", w.Err, diff, w.Detour)
		}
		if diff := cmp.Diff([]string{"canaryd-4"}, comments(rules.Nat)); diff != "" {
			t.Errorf("the chain then (-want +got):\n%s", diff)
		}
	})
}

func TestSessionRestoreOutlivesContext(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		k := openKernel(t, Config{Backend: NFT})
		k.cfg.RestoreTimeout = 300 * time.Millisecond
		standInRestore(t, k, rules.IPv4, "sleep 86400 & sleep 86400") // killed, or the test never ends
		s := begin(t, k)
		mustRead(t, s, rules.IPv4)
		_, err := write(t, s, rules.IPv4, scriptsOf(t, payload)...)
		want := &RestoreError{Reason: ReasonOther, Program: "restore", Exit: -1,
			Stderr: "restore was killed: it did not end within 300ms: context deadline exceeded"}
		var got *RestoreError
		errors.As(err, &got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("error (-want +got):\n%s", diff)
		}
	})
}

func TestSessionLock(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		k := openKernel(t, Config{Backend: Legacy, LockWait: 100 * time.Millisecond})
		s := begin(t, k)
		if _, err := k.Begin(t.Context()); !errors.Is(err, ErrLocked) {
			t.Errorf("a second session begins with %v, want ErrLocked", err)
		}
		// The lock excludes other processes, but not our own child, although the
		// child locks too.
		out := nstest.Command(t, "sh", "-c", "iptables-legacy -w 1 -N FOREIGN 2>&1; echo exit $?")
		if !strings.Contains(out, "exit 4") {
			t.Errorf("another iptables beside a session: %s", out)
		}
		mustRead(t, s, rules.IPv4)
		wantRestore(t, s, rules.IPv4, payload, false, nil)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if _, err := s.Read(t.Context(), rules.IPv4); !errors.Is(err, ErrClosed) {
			t.Errorf("Read after Close returns %v", err)
		}
		iptablesCommand(t, Legacy, rules.IPv4, "-N FOREIGN")
		begin(t, k)
	})
}

func TestTakeLockOfReplacedFile(t *testing.T) {
	path := t.TempDir() + "/lock"
	old, err := takeLock(t.Context(), path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	fresh, err := takeLock(t.Context(), path, 0)
	if err != nil {
		t.Fatalf("the lock's file was replaced: %v", err)
	}
	if _, err := takeLock(t.Context(), path, 0); !errors.Is(err, ErrLocked) {
		t.Errorf("taken twice: %v", err)
	}
	unix.Close(old)
	unix.Close(fresh)
	if _, err := takeLock(t.Context(), t.TempDir()+"/no/lock", time.Minute); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing folder: %v", err)
	}
}

func TestRestoreErrorsOfTheRealPrograms(t *testing.T) {
	nft, legacy := map[string]bool{"nft": true}, map[string]bool{"legacy": true}
	both := map[string]bool{"nft": true, "legacy": true}
	other := ReasonOther
	cases := []struct {
		name, payload string
		on            map[string]bool
		reason        Reason
		old           *Reason // up to 1.8.7
	}{
		{"missing target", "*filter\n-A INPUT -j NOPE\nCOMMIT\n", legacy, ReasonMissingChain, nil},
		{"missing target", "*filter\n-A INPUT -j NOPE\nCOMMIT\n", nft, ReasonMissingChain, nil},
		{"missing chain", "*filter\n-A NOPE -j ACCEPT\nCOMMIT\n", nft, ReasonMissingChain, &other},
		{"missing chain", "*filter\n-A NOPE -j ACCEPT\nCOMMIT\n", legacy, ReasonOther, nil},
		{"missing set", "*filter\n-A INPUT -m set --match-set nosuch src -j ACCEPT\nCOMMIT\n", both, ReasonMissingSet, nil},
		{"option", "*filter\n-A INPUT --bogus 3\nCOMMIT\n", both, ReasonParse, nil},
		{"match", "*filter\n-A INPUT -m nosuch\nCOMMIT\n", both, ReasonParse, nil},
		{"rubbish", "*filter\nrubbish\nCOMMIT\n", both, ReasonParse, nil},
		{"no commit", "*filter\n-A INPUT\n", both, ReasonParse, nil},
		{"port", "*filter\n-A INPUT -p tcp --dport 99999\nCOMMIT\n", both, ReasonParse, nil},
		{"refused", "*filter\n-A INPUT -j MASQUERADE\nCOMMIT\n", nft, ReasonOther, nil},
		{"refused", "*filter\n-A INPUT -j MASQUERADE\nCOMMIT\n", legacy, ReasonOther, nil},
	}
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		for _, c := range cases {
			if !c.on[string(backend)] {
				continue
			}
			err := k.restore(t.Context(), family, strings.NewReader(c.payload))
			var got *RestoreError
			if !errors.As(err, &got) {
				t.Errorf("%s: %v", c.name, err)
				continue
			}
			if c.old != nil && versions.ChainUnnamed.Here() {
				c.reason = *c.old
			}
			if got.Reason != c.reason || got.Exit <= 0 || got.Stderr == "" {
				t.Errorf("%s: %+v, want %s", c.name, got, c.reason)
			}
		}
	})
}

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		stderr string
		reason Reason
	}{
		{"Another app is currently holding the xtables lock. Stopped waiting after 1s.\n", ReasonLock},
		{"iptables-nft-restore v1.8.9 (nf_tables): \nline 2: RULE_APPEND failed (No such file or directory): rule in chain INPUT\n", ReasonOther},
		{"iptables-nft-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)\n", ReasonOther},
		{"iptables v1.8.9 (nf_tables): table `filter' is incompatible, use 'nft' tool.\n", ReasonIncompatible},
		{"iptables-restore v1.8.9 (legacy): iptables-restore: unable to initialize table 'filter'\nError occurred at line: 1\nTry `iptables-restore -h' or 'iptables-restore --help' for more information.\n", ReasonOther},
		{"iptables-nft-restore: line 2 failed: Index of insertion too big.\n", ReasonOther},
		{"", ReasonOther},
	} {
		if reason := classify(c.stderr); reason != c.reason {
			t.Errorf("classify(%q) = %s; want %s", c.stderr, reason, c.reason)
		}
	}
}

func TestRestoreTextCommits(t *testing.T) {
	for _, c := range []struct {
		name    string
		scripts []Script
		want    uint32
	}{
		{"no table", nil, 0},
		{"a table without a change", scriptsOf(t, "*nat\nCOMMIT\n"), 0},
		{"two tables", scriptsOf(t, payload), 2},
		{"one of two", scriptsOf(t, "*nat\nCOMMIT\n*filter\n:INPUT ACCEPT\n-A INPUT\nCOMMIT\n"), 1},
		{"a declaration alone", scriptsOf(t, "*nat\n:X - [0:0]\nCOMMIT\n"), 1},
		{"one table twice", slices.Repeat(scriptsOf(t, "*nat\n:X - [0:0]\n-A X\nCOMMIT\n"), 2), 2},
	} {
		if got := Scripts(c.scripts).commits(); got != c.want {
			t.Errorf("%s: %d commits, want %d", c.name, got, c.want)
		}
	}
}

func TestFirstLines(t *testing.T) {
	got := firstLines([]byte("# Warning: iptables-legacy tables present\nBad argument `x'\nError occurred at line: 2\nTry `iptables-restore -h'\n"))
	if want := "Bad argument `x'; Error occurred at line: 2"; got != want {
		t.Errorf("firstLines = %q, want %q", got, want)
	}
	if got := firstLines([]byte(strings.Repeat("x", 5000))); len(got) > maxErrorText+3 {
		t.Errorf("firstLines keeps %d bytes", len(got))
	}
}

func TestCommandBounds(t *testing.T) {
	sh := lookUp("sh")
	res, err := command{path: sh, args: []string{"-c", "head -c 100000 /dev/zero >&2; echo $LC_ALL $X"}, timeout: time.Minute, env: []string{"X=y"}}.run(t.Context())
	if err != nil || len(res.stderr) != maxStderr || string(res.stdout) != "C y\n" {
		t.Errorf("stderr has %d bytes, stdout is %q, %v", len(res.stderr), res.stdout, err)
	}
	if _, err := (command{path: "/no/such", timeout: time.Minute}).run(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing program: %v", err)
	}
	var kept strings.Builder
	b := boundedWriter{out: &kept, room: 3, onFull: errTooMuch}
	if n, err := b.Write([]byte("abcd")); n != 3 || !errors.Is(err, errTooMuch) {
		t.Errorf("a full buffer takes %d, %v", n, err)
	}
	if got := kept.String(); got != "abc" {
		t.Errorf("it holds %q", got)
	}
}

// A restore that reads a rule's word as an option of its own exits with 0 and
// writes nothing. That must count as a refusal. A rule without a text never
// reaches it.
func TestARestoreThatPrintsIsRefused(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend, Replay: ReplayText})
		iptablesCommand(t, backend, family, "-N MINE")
		for text, want := range map[string]string{
			"-i a -h -j ACCEPT": "it ended with 0, but printed something instead of writing",
			"-V":                "it ended with 0, but printed something instead of writing",
			rules.OpaqueRule([]byte("x"), "ACCEPT", "nobody knows").Spec: "a rule of chain MINE has no text: nobody knows",
		} {
			session := begin(t, k)
			mustRead(t, session, family)
			script := Script{Table: rules.Filter, Steps: []Step{{Verb: Append, Chain: "MINE", Rule: rules.Rule{Spec: text}}}}
			w := session.Restore(t.Context(), Payload{family: {script}})[family]
			var refused *RestoreError
			if !errors.As(w.Err, &refused) || refused.Reason != ReasonParse || !strings.Contains(refused.Stderr, want) {
				t.Errorf("%s: %v", text, w.Err)
			}
			if got := mustRead(t, session, family).Tables[rules.Filter].Chain("MINE"); len(got.Rules) != 0 {
				t.Errorf("%s: MINE holds %v", text, got.Rules)
			}
			if err := session.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
