package owners

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// open opens the node's kernel for IPv4 alone.
func open(n *nodetest.Node) *iptables.Kernel {
	n.Helper()
	kernel, err := iptables.Open(n.Context(), iptables.Config{Backend: n.Programs.With, Families: []rules.Family{rules.IPv4}})
	n.Must(err)
	n.Cleanup(func() { n.Must(kernel.Close()) })
	return kernel
}

// learned plants marks and returns a job for the present rules.
func learned(n *nodetest.Node, replayer reload.Replayer) reload.Job {
	n.Helper()
	job := reload.Job{Families: []rules.Family{rules.IPv4}, Generation: rules.Generation{}}
	planted, err := replayer.Plant(n.Context(), job)
	n.Must(err)
	for table, tr := range take(n, &job, planted, reload.Proved).Tables {
		job.Generation = job.Generation.With(rules.IPv4.Table(table), tr.Section)
	}
	return job
}

// take takes a result into the job.
func take(n *nodetest.Node, job *reload.Job, result reload.Result, want reload.Outcome) reload.FamilyResult {
	n.Helper()
	fr := result[rules.IPv4]
	if fr.Outcome != want {
		n.Fatalf("it is %s, want %s: %v", fr.Outcome, want, fr.Err)
	}
	for table, tr := range fr.Tables {
		job.Marks = job.Marks.With(rules.IPv4.Table(table), tr.Mark)
		if tr.Replayed {
			job.Quarantine = job.Quarantine.With(rules.IPv4.Table(table), tr.Quarantined)
		}
	}
	return fr
}

// TestBadLinesAreFoundOnTheKernel: the kernel refuses rules for a reason that
// canaryd does not look for: here a set, with nothing to look for it. They are
// left out, and 2,000 others are written, because the refused rules decide
// nothing.
func TestBadLinesAreFoundOnTheKernel(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		const many = 2000
		bad := map[int]bool{3: true, 1500: true}
		text := "*filter\n:KUBE-FORWARD - [0:0]\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\n-A FORWARD -j KUBE-FORWARD\n"
		var held []string
		for i := range many {
			spec := fmt.Sprintf("-s 10.1.%d.%d/32 -j DROP", i/256, i%256)
			if bad[i] {
				spec = fmt.Sprintf("-s 10.1.%d.%d/32 -m set --match-set gone src", i/256, i%256)
				held = append(held, spec)
			}
			text += "-A KUBE-FORWARD " + spec + "\n"
		}
		n.Must(exec.CommandContext(n.Context(), "ipset", "create", "gone", "hash:ip").Run())
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, text+"COMMIT\n"))

		kernel := open(n)
		replayer := reload.Replayer{Kernel: kernel, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: n.Protects}}
		job := learned(n, replayer)
		take := func(result reload.Result, err error, want reload.Outcome) reload.FamilyResult {
			n.Helper()
			n.Must(err)
			return take(n, &job, result, want)
		}
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Filter, ""))
		n.Must(exec.CommandContext(n.Context(), "ipset", "destroy", "gone").Run())
		healed, err := replayer.Heal(n.Context(), job)
		fr := take(healed, err, reload.Partial)
		var got []string
		for _, h := range job.Quarantine[rules.IPv4.Table(rules.Filter)] {
			got = append(got, h.Rule.Spec)
		}
		if d := cmp.Diff(held, got); d != "" {
			n.Errorf("quarantined (-want +got):\n%s", d)
		}
		saved, err := n.Programs.Save(n.Context(), rules.IPv4)
		n.Must(err)
		if count := strings.Count(saved, "-A KUBE-FORWARD "); count != many-len(bad) || strings.Contains(saved, "TRIAL") {
			n.Errorf("%d rules of %d are back, and a chain of trials: %t", count, many, strings.Contains(saved, "TRIAL"))
		}
		n.Logf("found in %s: %v", fr.Took, fr.Err)

		n.Must(exec.CommandContext(n.Context(), "ipset", "create", "gone", "hash:ip").Run())
		returned, err := replayer.Readmit(n.Context(), job)
		take(returned, err, reload.Proved)
		if saved, err = n.Programs.Save(n.Context(), rules.IPv4); err != nil || strings.Count(saved, "-A KUBE-FORWARD ") != many {
			n.Errorf("they did not come back: %v", err)
		}
	})
}

// A slipper is a kernel in whose sessions an owner writes after one of the
// restores without a guard, such as trials.
type slipper struct {
	reload.Beginner
	behind int
	write  func()
}

type slipped struct {
	iptables.Session
	slipper *slipper
}

func (s *slipper) Begin(ctx context.Context) (iptables.Session, error) {
	session, err := s.Beginner.Begin(ctx)
	return slipped{session, s}, err
}

func (s slipped) RestoreAnyway(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	written := s.Session.RestoreAnyway(ctx, payloads...)
	if s.slipper.behind--; s.slipper.behind == 0 {
		s.slipper.write()
	}
	return written
}

// TestAnOwnerWritesBetweenTwoTrials: a flush deleted chains. While canaryd
// searches for the refused rules, the owner of the chains writes them. Its rules must
// stay. On legacy it would wait for the lock.
func TestAnOwnerWritesBetweenTwoTrials(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		const newer = "-s 192.0.2.7/32 -j DROP"
		n.Must(exec.CommandContext(n.Context(), "ipset", "create", "gone", "hash:ip").Run())
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, `*filter
:KUBE-FORWARD - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-NODEPORTS - [0:0]
-A INPUT -j KUBE-FIREWALL
-A FORWARD -j KUBE-FORWARD
-A KUBE-FIREWALL -s 192.0.2.1/32 -j DROP
-A KUBE-FORWARD -j KUBE-NODEPORTS
-A KUBE-FORWARD -m set --match-set gone src -j DROP
-A KUBE-FORWARD -s 192.0.2.2/32 -j DROP
-A KUBE-NODEPORTS -s 192.0.2.3/32 -j DROP
COMMIT
`))
		kernel := &slipper{Beginner: open(n), behind: 3, write: func() {
			n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4,
				"*filter\n:KUBE-FIREWALL - [0:0]\n:KUBE-NODEPORTS - [0:0]\n-A KUBE-FIREWALL "+newer+"\n-A KUBE-NODEPORTS "+newer+"\nCOMMIT\n"))
		}}
		replayer := reload.Replayer{Kernel: kernel, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: n.Protects}}
		job := learned(n, replayer)
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Filter, ""))
		n.Must(n.Programs.DeleteChains(n.Context(), rules.IPv4, rules.Filter))
		n.Must(exec.CommandContext(n.Context(), "ipset", "destroy", "gone").Run())
		healed, err := replayer.Heal(n.Context(), job)
		n.Must(err)
		take(n, &job, healed, reload.Partial)
		if kernel.behind > 0 || job.Quarantine.Count() != 2 { // the rule, and the rule after it
			t.Fatalf("the owner wrote: %t; %d rules are quarantined", kernel.behind <= 0, job.Quarantine.Count())
		}
		n.Same("protected rules", []string{
			"ipv4 filter FORWARD 0000 -j KUBE-FORWARD",
			"ipv4 filter INPUT 0000 -j KUBE-FIREWALL",
			"ipv4 filter KUBE-FIREWALL",
			"ipv4 filter KUBE-FIREWALL 0000 " + newer,
			"ipv4 filter KUBE-FORWARD",
			"ipv4 filter KUBE-FORWARD 0000 -j KUBE-NODEPORTS",
			"ipv4 filter KUBE-NODEPORTS",
			"ipv4 filter KUBE-NODEPORTS 0000 " + newer,
		}, n.Protected())
	})
}

// TestCleanupTakesLeftoversOfTrials: a canaryd that is killed during a trial
// leaves the trial's chains behind. cleanup deletes them.
func TestCleanupTakesLeftoversOfTrials(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		foreign, protected := n.Foreign(), n.Protected()
		trial := func(_ rules.TableName, name string) bool { return strings.HasPrefix(name, "KUBE-CANARYD-") }
		for _, test := range []struct {
			flags []string
			want  []string
		}{{nil, protected}, {[]string{"--rules", "--protect=auto"}, nil}} {
			d := n.Start()
			d.Stop()
			for _, f := range rules.Families() {
				n.Must(n.Programs.RestoreNoflush(n.Context(), f, `*filter
:KUBE-CANARYD-TRIAL-CANARY - [0:0]
:KUBE-CANARYD-TRIAL-TO-CANARY - [0:0]
-A KUBE-CANARYD-TRIAL-CANARY -j KUBE-CANARYD-TRIAL-TO-CANARY
-A KUBE-CANARYD-TRIAL-CANARY -p tcp -j DROP
COMMIT
`))
			}
			n.Want(0, "cleanup", test.flags...)
			n.Same("chains of ours", nil, n.Lines(trial, canary.IsMark))
			n.Same("protected rules", test.want, n.Protected())
			n.Same("foreign rules", foreign, n.Foreign())
		}
	})
}
