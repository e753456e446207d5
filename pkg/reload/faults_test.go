package reload

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A meddler is a Beginner whose sessions let another process write right after each read. So the
// read is stale before its use.
type meddler struct {
	Beginner
	afterRead func()
}

type meddled struct {
	iptables.Session
	afterRead func()
}

func (m meddler) Begin(ctx context.Context) (iptables.Session, error) {
	s, err := m.Beginner.Begin(ctx)
	return meddled{s, m.afterRead}, err
}

func (m meddled) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	snapshot, err := m.Session.Read(ctx, f)
	m.afterRead()
	return snapshot, err
}

// meddle makes write run after each of the next reads, so many times.
func (n *testNode) meddle(times int, write func()) {
	n.replayer.Kernel = meddler{n.Fake, func() {
		if times > 0 {
			times--
			write()
		}
	}}
}

const newEndpoint = "*nat\n:KUBE-SVC-A - [0:0]\n-A KUBE-SVC-A -j RETURN\nCOMMIT\n"

func TestAReadThatSomebodyOvertookIsReadAgain(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	must(t, n.Flush(v4, rules.Nat, ""))
	reads := 0
	n.meddle(4, func() {
		reads++
		must(t, n.RestoreNoflush(v4, newEndpoint))
	})
	result := n.heal()
	n.outcome(result, v4, Proved)
	if reads != 4 {
		t.Errorf("%d reads were overtaken, want 4", reads)
	}
	// The owner's rule, written after the first read, counts.
	if d := cmp.Diff([]string{"KUBE-SVC-A"}, result[v4].Tables[rules.Nat].Skipped); d != "" {
		t.Errorf("skipped (-want +got):\n%s", d)
	}
	if got := n.SaveTable(v4, rules.Nat); !strings.Contains(got, "-A KUBE-SVC-A -j RETURN\n") || strings.Contains(got, "-A KUBE-SVC-A -j KUBE-MARK-MASQ") {
		t.Errorf("the owner's newer rule was overwritten:\n%s", got)
	}
}

// TestARotationBesideAWriter: another process commits between the rotation's read and its write. A
// guarded rotation gives up at once. Guarded by the marks alone it is proved, and leaves the other
// process's rules as they are.
func TestARotationBesideAWriter(t *testing.T) {
	for _, byMarks := range []bool{false, true} {
		t.Run(fmt.Sprintf("by marks %t", byMarks), func(t *testing.T) {
			n := newNode(t, iptables.NFT, nodeText, v4)
			n.job.ByMarks = byMarks
			restores, old := n.Restores(), n.job.Marks
			n.meddle(1, func() { must(t, n.RestoreNoflush(v4, newEndpoint)) })
			reads := n.Reads()
			result, err := n.replayer.Rotate(t.Context(), n.job)
			must(t, err)
			want := map[bool]struct {
				outcome         Outcome
				reads, restores int
				stale           bool
			}{false: {Failed, 1, 0, true}, true: {Proved, 2, 1, false}}[byMarks]
			n.outcome(result, v4, want.outcome)
			if err := result[v4].Err; errors.Is(err, nft.ErrStale) != want.stale {
				t.Errorf("error is %v, want ErrStale: %t", err, want.stale)
			}
			if got := n.Reads() - reads; got != want.reads {
				t.Errorf("%d reads, want %d", got, want.reads)
			}
			if got := n.Restores() - restores; got != want.restores {
				t.Errorf("%d restores, want %d", got, want.restores)
			}
			n.take(result)
			n.marked(v4)
			if renewed := n.job.Marks[v4.Table(rules.Nat)].Nonce != old[v4.Table(rules.Nat)].Nonce; renewed != byMarks {
				t.Errorf("the marks are renewed: %t", renewed)
			}
			if got := n.SaveTable(v4, rules.Nat); !strings.Contains(got, "-A KUBE-SVC-A -j RETURN\n") {
				t.Errorf("the owner's newer rule was overwritten:\n%s", got)
			}
		})
	}
}

func TestALossIsAnsweredEvenBesideAWriterThatNeverRests(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	n.flushAll(v4)
	n.meddle(1000, func() { must(t, n.RestoreNoflush(v4, "*nat\n-A corp -j RETURN\nCOMMIT\n")) })
	n.outcome(n.heal(), v4, Raced)
	n.marked(v4)
}

// TestACommitDuringTheRestoreMakesItRaced: another process inserts jumps during the restore. They
// stay for now, because it may still be at work. The daemon removes the copies when it is quiet.
func TestACommitDuringTheRestoreMakesItRaced(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4, v6)
	n.flushAll(v4)
	wrote := false
	n.BeforeRestore(func() {
		if !wrote {
			wrote = true
			must(t, n.RestoreNoflush(v4, "*nat\n:KUBE-SERVICES - [0:0]\n-I PREROUTING -j KUBE-SERVICES\n-I PREROUTING -j KUBE-SERVICES\nCOMMIT\n"))
		}
	})
	result := n.heal()
	n.outcome(result, v4, Raced)
	n.marked(v4)
	if err := result[v4].Aftercare; err != nil {
		t.Errorf("aftercare: %v", err)
	}
	if got := strings.Count(n.SaveTable(v4, rules.Nat), "-A PREROUTING -j KUBE-SERVICES\n"); got != 3 {
		t.Errorf("the jump stands %d times, want 3:\n%s", got, n.SaveTable(v4, rules.Nat))
	}
	n.nudged(v4)
}

func TestAFlushDuringTheRestoreIsNoProof(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	must(t, n.Flush(v4, rules.Nat, ""))
	n.OnCommit(func(c nft.Commit) {
		if c.PID != 7 && c.PID != 4242 && strings.Contains(n.SaveTable(v4, rules.Nat), ":KUBE-SVC-A") {
			must(t, n.As(7, "flusher").Flush(v4, rules.Nat, "")) // right behind canaryd's own commit
		}
	})
	result := n.heal()
	n.outcome(result, v4, Failed)
	if tr := result[v4].Tables[rules.Nat]; tr.Proved {
		t.Error("an empty table is called proved")
	}
}

// TestAFileRestoredBeforeTheProofIsTheFilesAndNotOurs: a file was saved right before a flush, with
// the marks of that time. Another process restores it between canaryd's write and the proof. Its
// marks must not become the current ones.
func TestAFileRestoredBeforeTheProofIsTheFilesAndNotOurs(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	old := strings.ReplaceAll(n.SaveTable(v4, rules.Nat), "-A KUBE-SVC-A -j KUBE-MARK-MASQ", "-A KUBE-SVC-A -j RETURN")
	must(t, n.Flush(v4, rules.Nat, ""))
	restored := false
	n.OnCommit(func(c nft.Commit) {
		if c.PID != 7 && !restored {
			restored = true
			must(t, n.As(7, "iptables-restore").Restore(v4, old))
		}
	})
	n.outcome(n.heal(), v4, Failed)
	n.outcome(n.heal(), v4, Proved)
	n.nudged(v4)
	n.same(v4)
	n.marked(v4)
}

func TestARestoreThatLiesIsNeverProved(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.Lie(1)
		result := n.heal()
		n.outcome(result, v4, Failed)
		for table, tr := range result[v4].Tables {
			if tr.Proved {
				t.Errorf("%s is called proved", table)
			}
		}
		n.outcome(n.heal(), v4, Proved)
		n.marked(v4)
	})
}

func TestARefusedRestoreFailsAndTheNextOneHeals(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.FailRestores(-1, iptables.ReasonMissingSet)
		result := n.heal()
		n.FailRestores(0, "")
		n.outcome(result, v4, Failed)
		n.outcome(result, v6, Skipped)
		var refused *iptables.RestoreError
		if !errors.As(result[v4].Err, &refused) || refused.Reason != iptables.ReasonMissingSet {
			t.Errorf("error is %v, want a *RestoreError for a missing set", result[v4].Err)
		}
		n.outcome(n.heal(), v4, Proved)
		n.marked(v4)
	})
}

// TestATableThatIsRefusedAsAWholeCostsNoOther: iptables-restore ends at a refused table. The next
// try writes the tables behind it.
func TestATableThatIsRefusedAsAWholeCostsNoOther(t *testing.T) {
	for k, refused := range protect.Always() {
		onBoth(t, func(t *testing.T, n *testNode) {
			n.flushAll(v4)
			n.PartialCommit(k + 1) // the tables before it are written
			result := n.heal()
			n.outcome(result, v4, Partial)
			if result[v4].DoneExceptQuarantined() {
				t.Error("all but single rules is called back")
			}
			for table, tr := range result[v4].Tables {
				if tr.Proved != (table != refused) || tr.Finding.Verdict != canary.Emptied {
					t.Errorf("%s is refused: %s was %s, proved %t", refused, table, tr.Finding.Verdict, tr.Proved)
				}
				if tr.Proved && len(tr.Placed) != len(tr.Lost.Jumps) {
					t.Errorf("%s is refused: %s lost %d jumps, and %d are called put back", refused, table, len(tr.Lost.Jumps), len(tr.Placed))
				}
			}
			again := n.heal()
			n.outcome(again, v4, Proved)
			if d := cmp.Diff(map[rules.TableName]bool{refused: true}, lost(again[v4])); d != "" {
				t.Errorf("lost at the next try (-want +got):\n%s", d)
			}
			n.marked(v4)
		})
	}
}

// lost returns the tables in which a replay found a loss.
func lost(fr FamilyResult) map[rules.TableName]bool {
	found := map[rules.TableName]bool{}
	for table, v := range verdicts(fr) {
		if v.Loss() {
			found[table] = true
		}
	}
	return found
}

// TestARefusalIsNobodyElsesWord: after a refusal canaryd does not know whether another process
// wrote. It must not ascribe a changed jump or chain to one.
func TestARefusalIsNobodyElsesWord(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.RestoreNoflush(v4, "*nat\n-D OUTPUT -j KUBE-SERVICES\nCOMMIT\n"))
		n.job.Quiet[v4] = true
		n.FailRestores(-1, iptables.ReasonOther)
		result := n.heal()
		n.outcome(result, v4, Failed)
		if tr := result[v4].Tables[rules.Nat]; tr.Finding.Verdict != canary.JumpsMissing || tr.Proved {
			t.Errorf("nat is %s, proved %t", tr.Finding.Verdict, tr.Proved)
		}
		n.FailRestores(0, "")
		n.outcome(n.heal(), v4, Proved)
		n.same(v4)
	})
}

func TestARestoreThatStopsHalfwayIsPartial(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.PartialCommit(3)
		result := n.heal()
		n.outcome(result, v4, Partial)
		got := map[rules.TableName]bool{}
		for table, tr := range result[v4].Tables {
			got[table] = tr.Proved
		}
		if d := cmp.Diff(map[rules.TableName]bool{rules.Mangle: true, rules.Nat: true, rules.Filter: false}, got); d != "" {
			t.Errorf("proved (-want +got):\n%s", d)
		}
		second := n.heal()
		n.outcome(second, v4, Proved)
		if v := verdicts(second[v4]); v[rules.Nat] != canary.Intact || v[rules.Filter] != canary.Emptied {
			t.Errorf("the second try found %v", v)
		}
		n.marked(v4)
	})
}

func TestAHeldLockPutsTheReplayOff(t *testing.T) {
	n := newNode(t, iptables.Legacy, nodeText, v4)
	n.flushAll(v4)
	release := n.HoldLock()
	reads := n.Reads()
	result, err := n.replayer.Heal(t.Context(), n.job)
	if !errors.Is(err, iptables.ErrLocked) || result != nil || n.Reads() != reads {
		t.Errorf("result %v, error %v and %d reads; want ErrLocked alone", result, err, n.Reads()-reads)
	}
	release()
	n.outcome(n.heal(), v4, Proved)
}

func TestWhatCannotBeReadIsNotTouched(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		restores := n.Restores()
		n.FailReads(nft.ErrPermission)
		result := n.heal()
		n.outcome(result, v4, Failed)
		if !errors.Is(result[v4].Err, nft.ErrPermission) || n.Restores() != restores {
			t.Errorf("error %v, %d restores", result[v4].Err, n.Restores()-restores)
		}
		n.FailReads(nil)
		n.DropTableFromReads(v4, rules.Nat, errors.New("a native rule"))
		for _, f := range []func(context.Context, Job) (Result, error){n.replayer.Heal, n.replayer.Plant, n.replayer.Rotate, n.replayer.Force} {
			nat := n.natSection()
			result, err := f(t.Context(), n.job)
			must(t, err)
			n.job.Marks = n.job.Marks.With(v4.Table(rules.Nat), result[v4].Tables[rules.Nat].Mark)
			if tr := result[v4].Tables[rules.Nat]; tr.Finding.Verdict != canary.Unknown || tr.Proved || tr.Read {
				t.Errorf("nat is %s, proved %v, read %v", tr.Finding.Verdict, tr.Proved, tr.Read)
			}
			if n.natSection() != nat {
				t.Error("a table that could not be read was written")
			}
		}
	})
}

// natSection returns canaryd's canary and KUBE-SERVICES of nat, even if nat cannot be read.
func (n *testNode) natSection() string {
	places := []iptables.Place{{Table: rules.Nat, Chain: canary.DefaultChain}, {Table: rules.Nat, Chain: "KUBE-SERVICES"}}
	probed, err := n.Probe(n.t.Context(), v4, places)
	must(n.t, err)
	return fmt.Sprint(probed.Holdings)
}

func TestATriedNonceIsRecognizedOnceItCanBeRead(t *testing.T) {
	tests := []struct {
		name  string
		fault func(n *testNode)
		want  canary.Verdict // of nat, at the next look
	}{
		{"the restore landed", func(*testNode) {}, canary.Intact},
		{"the restore did not land", func(n *testNode) { n.Lie(1) }, canary.Emptied},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, n *testNode) {
				must(t, n.Flush(v4, rules.Nat, ""))
				test.fault(n)
				// The proof's read fails.
				n.BeforeRestore(func() { n.FailReads(errors.New("out of memory")) })
				result := n.heal()
				n.outcome(result, v4, Failed)
				n.BeforeRestore(nil)
				n.FailReads(nil)
				mark := result[v4].Tables[rules.Nat].Mark
				if mark.Tried == nil {
					t.Fatal("the mark that was tried is forgotten")
				}
				again := n.heal()
				tr := again[v4].Tables[rules.Nat]
				if tr.Finding.Verdict != test.want {
					t.Errorf("nat is %s, want %s", tr.Finding.Verdict, test.want)
				}
				if landed := tr.Mark.Nonce == mark.Tried.Nonce; landed != (test.want == canary.Intact) || tr.Mark.Tried != nil {
					t.Errorf("the mark became %+v, tried was %s", tr.Mark, mark.Tried.Nonce)
				}
				n.marked(v4)
			})
		})
	}
}

// TestMarksAreKeptOnceForAWriteThatWasOvertaken: while marks are saved before a write, another
// process writes. The next try plants the same marks, which are saved already. So a process that is
// only a little faster does not overtake it again.
func TestMarksAreKeptOnceForAWriteThatWasOvertaken(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	must(t, n.Flush(v4, rules.Nat, ""))
	var kept []canary.Marks
	n.replayer.BeforeWrite = func(marks canary.Marks) {
		kept = append(kept, marks)
		must(t, n.RestoreNoflush(v4, "*nat\n-A corp -j RETURN\nCOMMIT\n")) // while the disk is slow
	}
	result := n.heal()
	n.outcome(result, v4, Proved)
	if len(kept) != 1 {
		t.Fatalf("marks were kept %d times, want once", len(kept))
	}
	if tried := kept[0][v4.Table(rules.Nat)].Tried; tried == nil || tried.Nonce != result[v4].Tables[rules.Nat].Mark.Nonce {
		t.Errorf("kept was %+v, planted is %+v", tried, result[v4].Tables[rules.Nat].Mark)
	}
	n.marked(v4)
}
