package iptables

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// anyStamps compares Evidence without its stamps.
var anyStamps = cmpopts.IgnoreUnexported(Evidence{})

// manyRules is a shell command that appends n rules. PRE is "ip" or "ip6".
func manyRules(backend Backend, n int) string {
	return fmt.Sprintf("for i in $(seq 1 %d); do echo \"-A INPUT -p tcp --dport $i\"; done | (echo '*filter'; cat; echo COMMIT) | PREtables-%s-restore --noflush", n, backend)
}

func hint(backend Backend) string {
	return fmt.Sprintf("PREtables-%s -t mangle -N KUBE-IPTABLES-HINT", backend)
}

// TestChooseScenes chooses on nodes in typical states, and in similar ones, in
// either family. Each line is a shell command.
func TestChooseScenes(t *testing.T) {
	for _, c := range []struct {
		name    string
		scene   []string
		backend Backend
		mixed   bool
		reason  string
	}{
		// Earlier choosers got these six scenes wrong.
		{"hint in nft, legacy nat merely listed", []string{hint(NFT), "PREtables-legacy -t nat -S"},
			NFT, false, "kubelet's hint chain is in nft only"},
		{"hint in nft behind a native rule", []string{hint(NFT), "nft add rule PRE mangle KUBE-IPTABLES-HINT ct state vmap '{ new : accept }'", manyRules(Legacy, 9)},
			NFT, true, "kubelet's hint chain is in nft and outweighs 9 rules in legacy"},
		{"hint in legacy, one family only", []string{hint(Legacy)},
			Legacy, false, "kubelet's hint chain is in legacy only"},
		{"stale nft hint and a rule beside it, 300 live legacy rules", []string{hint(NFT), "PREtables-nft -N OLD", "PREtables-nft -A OLD", manyRules(Legacy, 300)},
			Legacy, true, "legacy holds 300 rules, so kubelet's hint chain in nft is stale"},
		{"5 legacy rules, no hints", []string{manyRules(Legacy, 5)},
			Legacy, false, "legacy holds more rules: legacy 5, nft 0"},
		{"legacy hint, 50 foreign nft rules", []string{hint(Legacy), manyRules(NFT, 50)},
			Legacy, false, "kubelet's hint chain is in legacy and outweighs 50 rules in nft"},

		{"nothing", nil, NFT, false, "iptables' tables hold no rules, and nft is the default"},
		{"hints on both sides", []string{hint(NFT), "PREtables-legacy -t mangle -N KUBE-KUBELET-CANARY", manyRules(NFT, 3), manyRules(Legacy, 4)},
			Legacy, true, "legacy holds more rules: legacy 4, nft 3"},
		{"the hint in both families counts once", []string{"iptables-nft -t mangle -N KUBE-IPTABLES-HINT", "ip6tables-nft -t mangle -N KUBE-IPTABLES-HINT", manyRules(Legacy, 101)},
			Legacy, false, "legacy holds 101 rules, so kubelet's hint chain in nft is stale"},
		{"a tie", []string{strings.ReplaceAll(manyRules(Legacy, 2), "PRE", "ip"), strings.ReplaceAll(manyRules(NFT, 2), "PRE", "ip6")},
			NFT, true, "both backends hold 2 rules, and nft is the default"},
		{"jumps do not count twice", []string{"PREtables-nft -N X", "PREtables-nft -A INPUT -j X", "PREtables-nft -A X", manyRules(Legacy, 3)},
			Legacy, true, "legacy holds more rules: legacy 3, nft 2"},
		{"foreign nft tables", []string{"nft add table PRE own", "nft add chain PRE own KUBE-IPTABLES-HINT", "nft add rule PRE own KUBE-IPTABLES-HINT accept"},
			NFT, false, "iptables' tables hold no rules, and nft is the default"},
		{"a hint chain outside mangle", []string{"PREtables-legacy -t filter -N KUBE-IPTABLES-HINT"},
			NFT, false, "iptables' tables hold no rules, and nft is the default"},
		{"only our own", []string{
			"PREtables-nft -t nat -N " + canary, "PREtables-nft -t nat -A " + canary + " -m comment --comment canaryd-1", "PREtables-nft -A INPUT -m comment --comment canaryd-1",
			"PREtables-legacy -t nat -N " + canary, "PREtables-legacy -t nat -A " + canary, "PREtables-legacy -A INPUT -m comment --comment canaryd-1"},
			NFT, false, "iptables' tables hold no rules, and nft is the default"},
	} {
		for _, family := range rules.Families() {
			t.Run(c.name+"/"+family.String(), func(t *testing.T) {
				nstest.Run(t, func(t *testing.T) {
					got := inScene(t, family, c.scene)
					if got.Backend != c.backend || got.Mixed != c.mixed || got.Reason != c.reason {
						t.Errorf("got %s, mixed %t, %q; want %s, %t, %q", got.Backend, got.Mixed, got.Reason, c.backend, c.mixed, c.reason)
					}
				})
			})
		}
	}
}

// inScene prepares a scene and chooses. That must create no table and execute
// nothing.
func inScene(t *testing.T, family rules.Family, scene []string) Evidence {
	t.Helper()
	nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy", "nft")
	nstest.Command(t, "sh", "-ec", strings.ReplaceAll(strings.Join(scene, "\n"), "PRE", familyPrefix(family)))
	before := tablesOf(t, NFT) + tablesOf(t, Legacy)
	got, err := chooseWithout(t, ChooseConfig{Canary: canary}, nstest.LackExec())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, tablesOf(t, NFT)+tablesOf(t, Legacy)); diff != "" {
		t.Errorf("looking created tables (-before +after):\n%s", diff)
	}
	return got
}

// chooseWithout is Choose on a kernel that lacks something.
func chooseWithout(t *testing.T, cfg ChooseConfig, lacks ...nstest.Lack) (Evidence, error) {
	t.Helper()
	var got Evidence
	err := without(t, func() (err error) { got, err = Choose(t.Context(), cfg); return err }, lacks...)
	return got, err
}

// without runs do in a thread whose kernel seems to lack something.
func without(t *testing.T, do func() error, lacks ...nstest.Lack) error {
	t.Helper()
	done := make(chan error)
	go func() {
		if err := nstest.Without(lacks...); err != nil {
			t.Error(err)
		}
		done <- do()
	}()
	return <-done
}

// TestLackExec: the check that Choose executes nothing would notice a program.
func TestLackExec(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		if err := without(t, func() error { return exec.Command("true").Run() }, nstest.LackExec()); err == nil {
			t.Error("a program was executed where none may be")
		}
	})
}

// TestChooseOnOtherKernels: parts that the kernel lacks are left out without an
// error.
func TestChooseOnOtherKernels(t *testing.T) {
	v4, v6 := rules.IPv4, rules.IPv6
	type counts = map[rules.Family]map[Backend]Count
	none := map[Backend]Count{}
	for _, c := range []struct {
		name  string
		scene []string
		lacks []nstest.Lack
		want  Evidence
	}{
		{"no IPv6", []string{hint(Legacy)}, []nstest.Lack{nstest.LackIPv6()}, Evidence{
			Backend: Legacy, Reason: "kubelet's hint chain is in legacy only",
			Counts: counts{v4: {NFT: {}, Legacy: {Hint: true}}, v6: none},
		}},
		{"no legacy tables", []string{manyRules(NFT, 7)}, nstest.LackLegacy(), Evidence{
			Backend: NFT, Reason: "nft holds more rules: nft 7, legacy 0",
			Counts: counts{v4: {NFT: {Rules: 7}}, v6: {NFT: {}}},
		}},
		{"no legacy tables, nothing there", nil, nstest.LackLegacy(), Evidence{
			Backend: NFT, Reason: "iptables' tables hold no rules, and nft is the default",
			Counts: counts{v4: {NFT: {}}, v6: {NFT: {}}},
		}},
		{"no nf_tables, nothing there", nil, []nstest.Lack{nstest.LackNFT()}, Evidence{
			Backend: Legacy, Reason: "the kernel has no nf_tables",
			Counts: counts{v4: {Legacy: {}}, v6: {Legacy: {}}},
		}},
		{"no nf_tables", []string{manyRules(Legacy, 7)}, []nstest.Lack{nstest.LackNFT()}, Evidence{
			Backend: Legacy, Reason: "legacy holds more rules: legacy 7, nft 0",
			Counts: counts{v4: {Legacy: {Rules: 7}}, v6: {Legacy: {}}},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft", "iptables-legacy")
				nstest.Command(t, "sh", "-ec", strings.ReplaceAll(strings.Join(c.scene, "\n"), "PRE", "ip"))
				if c.lacks != nil && strings.Contains(c.name, "no legacy") {
					nstest.Command(t, "sh", "-ec", "mount --bind /dev/null /proc/net/ip_tables_names; mount --bind /dev/null /proc/net/ip6_tables_names")
				}
				got, err := chooseWithout(t, ChooseConfig{Canary: canary}, c.lacks...)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(c.want, got, anyStamps); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestOpenWithoutIPv6: the family is left out, and the log has the reason.
func TestOpenWithoutIPv6(t *testing.T) {
	for _, backend := range []Backend{NFT, Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, program(backend, rules.IPv4, ""), program(backend, rules.IPv6, ""))
				err := without(t, func() error {
					k, err := Open(t.Context(), Config{Backend: backend})
					if err != nil {
						return err
					}
					defer k.Close()
					if diff := cmp.Diff([]rules.Family{rules.IPv4}, k.Families()); diff != "" {
						t.Errorf("families (-want +got):\n%s", diff)
					}
					if why := k.Disabled()[rules.IPv6]; !errors.Is(why, ErrNoFamily) || !strings.Contains(why.Error(), "the kernel has no IPv6") {
						t.Errorf("IPv6 is disabled because of %v", why)
					}
					_, err = k.Read(t.Context(), rules.IPv4)
					return err
				}, nstest.LackIPv6())
				if err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestChooseUnknown: an unreadable backend is an error, never "no evidence".
func TestChooseUnknown(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for _, family := range rules.Families() {
			_, err := chooseUnprivileged(t, family)
			if !errors.Is(err, nft.ErrPermission) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
				t.Errorf("%v without CAP_NET_ADMIN: %v", family, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		iptablesCommand(t, Legacy, rules.IPv4, "-A INPUT")
		if _, err := Choose(ctx, ChooseConfig{}); !errors.Is(err, context.Canceled) {
			t.Errorf("a context that ended: %v", err)
		}
	})
}

func chooseUnprivileged(t *testing.T, family rules.Family) (Evidence, error) {
	var got Evidence
	return got, without(t, func() (err error) {
		dropNetAdmin(t)
		got, err = Choose(t.Context(), ChooseConfig{Families: []rules.Family{family}})
		return err
	})
}

// TestDecide tests the weights without a kernel.
func TestDecide(t *testing.T) {
	hinted := func(n int) Count { return Count{Rules: n, Hint: true} }
	plain := func(n int) Count { return Count{Rules: n} }
	for _, c := range []struct {
		name        string
		nft, legacy Count
		want        Backend
		mixed       bool
		reason      string
	}{
		{"hint in nft; legacy merely listed", hinted(0), plain(0), NFT, false, "kubelet's hint chain is in nft only"},
		{"hint in nft behind a native rule", hinted(1), plain(0), NFT, false, "kubelet's hint chain is in nft only"},
		{"hint in legacy only", plain(0), hinted(0), Legacy, false, "kubelet's hint chain is in legacy only"},
		{"stale nft hint, 300 live legacy rules", hinted(0), plain(300), Legacy, false, "legacy holds 300 rules, so kubelet's hint chain in nft is stale"},
		{"the same with a stale rule", hinted(1), plain(300), Legacy, true, "legacy holds 300 rules, so kubelet's hint chain in nft is stale"},
		{"5 legacy rules, no hints", plain(0), plain(5), Legacy, false, "legacy holds more rules: legacy 5, nft 0"},
		{"legacy hint, 50 foreign nft rules", plain(50), hinted(0), Legacy, false, "kubelet's hint chain is in legacy and outweighs 50 rules in nft"},

		{"a hint with live rules beside more of others", hinted(250), plain(300), NFT, true, "kubelet's hint chain is in nft and outweighs 300 rules in legacy"},
		{"stale legacy hint, 300 live nft rules", plain(300), hinted(1), NFT, true, "nft holds 300 rules, so kubelet's hint chain in legacy is stale"},
		{"both hints", hinted(9), hinted(8), NFT, true, "nft holds more rules: nft 9, legacy 8"},
		{"both hints, more on legacy", hinted(8), hinted(9), Legacy, true, "legacy holds more rules: legacy 9, nft 8"},
		{"the last rule below the hint's weight", hinted(0), plain(99), NFT, false, "kubelet's hint chain is in nft and outweighs 99 rules in legacy"},
		{"as many as the hint's weight", hinted(0), plain(100), NFT, false, "kubelet's hint chain is worth 100 rules: a tie, and nft is the default"},
		{"the first rule above the hint's weight", hinted(0), plain(101), Legacy, false, "legacy holds 101 rules, so kubelet's hint chain in nft is stale"},
		{"one rule", plain(0), plain(1), Legacy, false, "legacy holds more rules: legacy 1, nft 0"},
		{"a tie", plain(1), plain(1), NFT, true, "both backends hold 1 rule, and nft is the default"},
		{"neither", plain(0), plain(0), NFT, false, "iptables' tables hold no rules, and nft is the default"},
	} {
		t.Run(c.name, func(t *testing.T) {
			// The result must not depend on how rules and hints are spread over
			// the families.
			for _, counts := range []map[rules.Family]map[Backend]Count{
				{rules.IPv4: {NFT: c.nft, Legacy: c.legacy}},
				{rules.IPv4: {NFT: c.nft}, rules.IPv6: {Legacy: c.legacy}},
				{rules.IPv4: {NFT: {Hint: c.nft.Hint}, Legacy: {Rules: c.legacy.Rules}}, rules.IPv6: {NFT: c.nft, Legacy: {Hint: c.legacy.Hint}}},
			} {
				got := Evidence{Counts: counts}
				got.Decide(true)
				want := Evidence{Backend: c.want, Mixed: c.mixed, Reason: c.reason, Counts: counts}
				if diff := cmp.Diff(want, got, anyStamps); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				if empty := c.nft == (Count{}) && c.legacy == (Count{}); got.Empty() != empty {
					t.Errorf("Empty is %t", got.Empty())
				}
			}
		})
	}
}

// TestPrefer: the backend that was guarded before counts only without evidence.
func TestPrefer(t *testing.T) {
	rules4 := map[rules.Family]map[Backend]Count{rules.IPv4: {NFT: {Rules: 1}, Legacy: {}}}
	for _, test := range []struct {
		evidence Evidence
		before   Backend
		want     Backend
	}{
		{Evidence{Backend: NFT}, Legacy, Legacy},
		{Evidence{Backend: NFT}, "", NFT},
		{Evidence{Backend: NFT, Counts: rules4}, Legacy, NFT},
	} {
		if got := test.evidence.Prefer(test.before); got.Backend != test.want {
			t.Errorf("%+v, %q before: got %s, want %s", test.evidence, test.before, got.Backend, test.want)
		}
	}
}

// TestForce: a backend that was asked for is taken, and the evidence is shown.
func TestForce(t *testing.T) {
	evidence := func(nft, legacy int) Evidence {
		e := Evidence{Counts: map[rules.Family]map[Backend]Count{rules.IPv4: {NFT: {Rules: nft}, Legacy: {Rules: legacy}}}}
		e.Decide(true)
		return e
	}
	for _, c := range []struct {
		name   string
		by     Evidence
		force  Backend
		reason string
	}{
		{"as the evidence has it", evidence(0, 5), Legacy, "it was asked for"},
		{"against the evidence", evidence(2, 5), NFT, "it was asked for, against the evidence: legacy holds more rules: legacy 5, nft 2"},
		{"no evidence", evidence(0, 0), Legacy, "it was asked for"},
		{"evidence that could not be read", Evidence{}, Legacy, "it was asked for"},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := c.by
			want.Backend, want.Reason = c.force, c.reason
			if diff := cmp.Diff(want, c.by.Force(c.force), anyStamps); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestEvidenceJSON(t *testing.T) {
	e := Evidence{Counts: map[rules.Family]map[Backend]Count{rules.IPv4: {NFT: {Rules: 2}, Legacy: {Hint: true}}, rules.IPv6: {}}, stamps: map[Backend]uint64{NFT: 1}}
	e.Decide(true)
	text, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"backend":"legacy","reason":"kubelet's hint chain is in legacy and outweighs 2 rules in nft","mixed":false,` +
		`"counts":{"ipv4":{"legacy":{"rules":0,"hint":true},"nft":{"rules":2,"hint":false}},"ipv6":{}}}`
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestChooseBesideABusyWriter: another process commits while the chains are
// listed, so the list may be incomplete. Choose must overlook no hint and no
// table.
func TestChooseBesideABusyWriter(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		var add, remove strings.Builder
		for i := range 1000 {
			fmt.Fprintf(&add, "add chain ip first c%d\n", i)
			fmt.Fprintf(&remove, "delete chain ip first c%d\n", i)
		}
		nstest.Command(t, "nft", "add", "table", "ip", "first") // the hint follows its chains
		iptablesCommand(t, NFT, rules.IPv4, "-t mangle -N KUBE-IPTABLES-HINT")
		nstest.Command(t, "sh", "-ec", strings.ReplaceAll(manyRules(NFT, 5), "PRE", "ip"))
		writer := exec.CommandContext(t.Context(), "sh", "-c", `while :; do echo "$0" | nft -f - && echo "$1" | nft -f - || exit 1; done`, add.String(), remove.String())
		if err := writer.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = writer.Process.Kill(); _ = writer.Wait() }() // nothing else ends it
		stamp, err := stampNFT()
		if err != nil {
			t.Fatal(err)
		}
		missed, commits := 0, testkit.Size(uint64(20), 60)
		for now := stamp; now < stamp+commits; now, err = stampNFT() {
			got, chooseErr := Choose(t.Context(), ChooseConfig{Canary: canary})
			if err = errors.Join(err, chooseErr); err != nil {
				t.Fatal(err)
			}
			if got.Counts[rules.IPv4][NFT] != (Count{Rules: 5, Hint: true}) {
				missed++
			}
		}
		if missed > 0 {
			t.Errorf("%d times something was overlooked", missed)
		}
	})
}
