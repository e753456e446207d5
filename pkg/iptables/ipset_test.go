package iptables

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

func TestASetIsReadFromWhatIpsetPrints(t *testing.T) {
	tests := []struct {
		name, text string
		want       Set
		wrong      string
	}{
		{name: "a", text: "create a hash:ip family inet maxelem 65536\nadd a 1.2.3.4\nadd a 1.2.3.5 timeout 9\n",
			want: Set{Name: "a", Create: "hash:ip family inet maxelem 65536", Members: []string{"1.2.3.4", "1.2.3.5 timeout 9"}}},
		{name: "a", text: "create a bitmap:port range 0-65535\n", want: Set{Name: "a", Create: "bitmap:port range 0-65535"}},
		{name: "a", text: "create a hash:ip comment\nadd a 1.2.3.4 comment \"add b 6.6.6.6\"\n",
			want: Set{Name: "a", Create: "hash:ip comment", Members: []string{`1.2.3.4 comment "add b 6.6.6.6"`}}},
		{name: "a", text: "create a hash:ip comment\nadd a 1.2.3.4 comment \"x\nadd b 6.6.6.6\"\n", wrong: "add b"},
		{name: "a", text: "create a hash:ip comment\nadd a 1.2.3.4 comment \"x\nflush\n", wrong: "flush"},
		{name: "a", text: "create a hash:ip\ncreate a hash:net\n", wrong: "create a hash:net"},
		{name: "a", text: "add a 1.2.3.4\ncreate a hash:ip\n", wrong: "add a"},
		{name: "a", text: "create ab hash:ip\n", wrong: "create ab"},
		{name: "a", text: "create a hash:ip\nadd a -exist\n", wrong: "-exist"},
		{name: "a", text: "create a hash:ip\nadd a 1.2.3.4\tx\n", wrong: "cannot be restored"},
		{name: "a", text: "", wrong: "cannot be restored"},
	}
	for _, test := range tests {
		got, err := parseSet(test.name, test.text)
		if (err != nil) != (test.wrong != "") || err != nil && !strings.Contains(err.Error(), test.wrong) {
			t.Errorf("%q: error is %v, want one with %q", test.text, err, test.wrong)
		}
		if d := cmp.Diff(test.want, got, cmpopts.EquateEmpty()); err == nil && d != "" {
			t.Errorf("%q (-want +got):\n%s", test.text, d)
		}
	}
}

func TestHostileNamesOfSets(t *testing.T) {
	for name, want := range map[string]bool{
		"KUBE-CLUSTER-IP": true, "cali40s:x.y_z@": true, strings.Repeat("a", 31): true,
		"": false, strings.Repeat("a", 32): false, "-exist": false, "a b": false, "a\nb": false, `a"b`: false, `a\b`: false, "ä": false, draftPrefix + "1": false,
	} {
		if got := (Set{Name: name, Create: "hash:ip"}).Validate() == nil; got != want {
			t.Errorf("%q is fine: %t", name, got)
		}
	}
}

func FuzzSetsAreReadSafely(f *testing.F) {
	f.Add("a", "create a hash:ip\nadd a 1.2.3.4\n")
	f.Add("a b", "create a b hash:ip\n")
	f.Fuzz(func(t *testing.T, name, text string) {
		set, err := parseSet(name, text)
		if err != nil {
			return
		}
		var again strings.Builder
		fmt.Fprintf(&again, "create %s %s\n", set.Name, set.Create)
		for _, m := range set.Members {
			fmt.Fprintf(&again, "add %s %s\n", set.Name, m)
		}
		if lines := strings.Count(again.String(), "\n"); lines != 1+len(set.Members) || strings.ContainsAny(set.Name, " \n\"") {
			t.Errorf("%q becomes %d lines for %d members", text, lines, len(set.Members))
		}
		if twice, err := parseSet(name, again.String()); err != nil || !cmp.Equal(set, twice, cmpopts.EquateEmpty()) {
			t.Errorf("%q is not read back: %v", again.String(), err)
		}
	})
}

func ipset(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ipset", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("ipset %q: %v: %s", args, err, out)
	}
	return string(out)
}

// TestSetsOnTheKernel: restored sets have the same contents. Existing sets are
// never touched, and no reader ever sees half of a set.
func TestSetsOnTheKernel(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "ipset")
		ctx, sets := t.Context(), NewSets()
		ipset(t, "create", "hosts", "hash:ip", "comment", "counters", "timeout", "0")
		// ipset 7.22 crashes on "ipset add" with a comment.
		nstest.CommandInput(t, "add hosts 10.0.0.1 comment \"the\"\n", "ipset", "restore")
		ipset(t, "add", "hosts", "10.0.0.2", "timeout", "5000")
		ipset(t, "create", "ports", "bitmap:port", "range", "0-1023")
		ipset(t, "add", "ports", "53")
		ipset(t, "create", "six", "hash:net,port", "family", "inet6")
		ipset(t, "add", "six", "fd00::/64,udp:53")
		ipset(t, "create", "all", "list:set")
		ipset(t, "add", "all", "hosts")
		ipset(t, "create", "a b", "hash:ip")
		saved, err := sets.Save(ctx, []string{"all", "ports", "six", "nosuch", "a b", "all"})
		if err == nil || !strings.Contains(err.Error(), `"a b"`) {
			t.Errorf("the error is %v, want one about \"a b\"", err)
		}
		if len(saved) != 4 || saved["hosts"].Name != "hosts" {
			t.Errorf("%d sets were saved, want all, hosts that is in it, ports and six: %v", len(saved), saved)
		}
		before := map[string]string{}
		for name := range saved {
			before[name] = ipset(t, "save", name)
		}
		for _, name := range []string{"all", "hosts", "ports", "six"} {
			if err := sets.Create(ctx, saved[name]); !errors.Is(err, ErrSetStands) {
				t.Errorf("creating %s where it stands: %v", name, err)
			}
			if after := ipset(t, "save", name); !strings.Contains(name, "hosts") && after != before[name] {
				t.Errorf("%s was changed to\n%s", name, after)
			}
		}
		for _, name := range []string{"all", "hosts", "ports", "six"} {
			ipset(t, "destroy", name)
		}
		for _, name := range []string{"hosts", "ports", "six", "all"} {
			if err := sets.Create(ctx, saved[name]); err != nil {
				t.Error(err)
			}
			if after := ipset(t, "save", name); name != "hosts" && after != before[name] { // its timeouts run
				t.Errorf("%s came back as\n%s, was\n%s", name, after, before[name])
			}
		}
		if text := ipset(t, "save", "hosts"); !strings.Contains(text, `add hosts 10.0.0.1 timeout 0 packets 0 bytes 0 comment "the"`) {
			t.Errorf("hosts came back as %s", text)
		}
		bad := Set{Name: "bad", Create: "hash:ip", Members: []string{"10.0.0.1", "no address at all"}}
		if err := sets.Create(ctx, bad); err == nil {
			t.Error("a set with a bad member was created")
		}
		names, err := sets.Names(ctx)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(names)
		if d := cmp.Diff([]string{"a b", "all", "hosts", "ports", "six"}, names); d != "" {
			t.Errorf("sets (-want +got):\n%s", d)
		}
		for range 2 {
			if err := sets.Account(ctx, "ct_state_invalid_dropped_pkts"); err != nil {
				t.Error(err)
			}
		}
		for _, backend := range []Backend{NFT, Legacy} {
			out, err := exec.CommandContext(ctx, "iptables-"+string(backend), "-A", "INPUT", "-m", "nfacct", "--nfacct-name", "ct_state_invalid_dropped_pkts").CombinedOutput()
			if err != nil {
				t.Errorf("%s: the nfacct object is not there: %s", backend, out)
			}
		}
		if _, err := (&Sets{}).Save(ctx, []string{"other"}); err == nil || !strings.Contains(err.Error(), "not installed") {
			t.Errorf("without the program: %v", err)
		}
	})
}
