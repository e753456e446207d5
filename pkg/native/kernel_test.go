package native_test

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// openKernel returns an open kernel, which knows its own commits.
func openKernel(t testing.TB) *native.Kernel { return openLimited(t, 0) }

// openLimited is openKernel with a limit of size.
func openLimited(t testing.TB, most int) *native.Kernel {
	t.Helper()
	port := nft.NewPort()
	k := native.NewLateKernel(port, func(from, _ uint32) bool { return from == port }, nil, most)
	t.Cleanup(func() { k.Close() })
	if awake, err := k.Wake(nil); err != nil || !awake {
		t.Fatalf("open %t, %v", awake, err)
	}
	return k.Kernel
}

// TestKernelHears: canaryd hears of each commit once, with its process and its deeds. After the
// kernel has dropped notifications, Hear must report that, and hear of later commits again.
func TestKernelHears(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		k := openKernel(t)
		hear := func() (commits []native.Commit, missed bool) {
			t.Helper()
			genid, err := k.Genid()
			if err != nil {
				t.Fatal(err)
			}
			if commits, missed, err = k.Hear(genid); err != nil {
				t.Fatal(err)
			}
			return commits, missed
		}
		genid, _ := k.Genid()
		if _, err := k.Write(genid, nil, map[tableid.Family]string{tableid.IPv4: "0123"}); err != nil {
			t.Fatal(err)
		}
		if _, err := k.Write(genid, nil, nil); err != nft.ErrStale {
			t.Errorf("a write at an old genid: %v", err)
		}
		nstest.CommandInput(t, kubeProxy, "nft", "-f", "-")
		commits, missed := hear()
		if len(commits) != 2 || missed || !commits[0].Own || commits[1].Own || commits[1].Comm != "nft" {
			t.Fatalf("heard %+v, missed %t", commits, missed)
		}
		nstest.Command(t, "nft", "flush", "ruleset")
		commits, missed = hear()
		id := tableid.IPv4.Table("kube-proxy")
		if len(commits) != 1 || missed || !commits[0].WitnessLost[tableid.IPv4] || !commits[0].Deeds[id].Deleted {
			t.Fatalf("heard %+v, missed %t", commits, missed)
		}

		// Each rule is a notification. So many do not fit into the 8 MiB of a socket.
		many := "add table ip kube-proxy\nadd chain ip kube-proxy c\n" + strings.Repeat("add rule ip kube-proxy c tcp dport 80 accept\n", 45_000)
		nstest.CommandInput(t, many, "nft", "-f", "-")
		nstest.Command(t, "nft", "flush", "ruleset")
		if _, missed = hear(); !missed {
			t.Error("nothing was missed of 45,000 rules: this shows nothing")
		}
		nstest.Command(t, "nft", "add", "table", "ip", "kube-proxy")
		if commits, missed = hear(); len(commits) != 1 || missed || commits[0].Deeds[id].Made == 0 {
			t.Errorf("after an overflow: heard %+v, missed %t", commits, missed)
		}
		if err := native.RemoveWitnesses(nft.NewPort()); err != nil {
			t.Error(err)
		}
	})
}

// TestLateKernel: the kernel is opened when the first wanted table exists, and hears of later
// commits.
func TestLateKernel(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		k := native.NewLateKernel(nft.NewPort(), func(uint32, uint32) bool { return false }, nil, 0)
		defer func() {
			if err := k.Close(); err != nil {
				t.Error(err)
			}
		}()
		wanted := func(table nft.Table) bool { return table.Name == "wanted" }
		for _, step := range []struct {
			command string
			want    bool
		}{{"list ruleset", false}, {"add table ip other", false}, {"add table inet wanted", true}, {"delete table inet wanted", true}} {
			nstest.Command(t, "nft", strings.Fields(step.command)...)
			awake, err := k.Wake(wanted)
			if err != nil || awake != step.want || (k.Kernel != nil) != step.want {
				t.Fatalf("after %s it is open: %t, %v, want %t", step.command, awake, err, step.want)
			}
		}
		genid, err := k.Genid()
		if err != nil {
			t.Fatal(err)
		}
		commits, missed, err := k.Hear(genid)
		if err != nil || missed || len(commits) != 1 || !commits[0].Deeds[tableid.Inet.Table("wanted")].Deleted {
			t.Errorf("it heard of %+v, missed %t, %v; want the deletion", commits, missed, err)
		}
	})
}
