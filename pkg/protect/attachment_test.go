package protect_test

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// nodesCNI returns the rules of real plugins for two containers, after a read.
func nodesCNI(t *testing.T) rules.Section {
	t.Helper()
	text, err := os.ReadFile("../../internal/testkit/scenario/testdata/node/cni.v4.rules")
	if err != nil {
		t.Fatal(err)
	}
	fake := iptablestest.NewFake(iptables.NFT)
	if err := fake.RestoreNoflush(rules.IPv4, string(text)); err != nil {
		t.Fatal(err)
	}
	set := savefile.Tables(t, fake.Save(rules.IPv4))
	return selector(t, "cni").Protection().Extract(set[rules.Nat], func(rules.Rule) bool { return false })
}

// TestWithoutAttachments: a container's rules must disappear completely, and all rules of other
// containers must remain.
func TestWithoutAttachments(t *testing.T) {
	s := nodesCNI(t)
	first := protect.Attachment{Network: "cbr0", Container: "5f1e0c6a2b7d4e89a1c3f5d7b9e1a3c5"}
	second := protect.Attachment{Network: "cbr0", Container: "c2d94b1f8e6a47d0b3a5c7e9f1b3d5a7"}
	if d := cmp.Diff(map[protect.Attachment]bool{first: true, second: true}, protect.Attachments(s)); d != "" {
		t.Fatalf("attachments (-want +got):\n%s", d)
	}
	left := protect.Detach(s, map[protect.Attachment]bool{first: true})
	if d := cmp.Diff(map[protect.Attachment]bool{second: true}, protect.Attachments(left)); d != "" {
		t.Errorf("attachments (-want +got):\n%s", d)
	}
	if len(left.Jumps) != len(s.Jumps)-1 || len(left.Chains) != len(s.Chains)-2 {
		t.Errorf("%d jumps of %d and %d chains of %d are left", len(left.Jumps), len(s.Jumps), len(left.Chains), len(s.Chains))
	}
	for _, name := range []string{"CNI-46d5e6e569f30aa7e18e02f1", "CNI-DN-46d5e6e569f30aa7e18e0"} {
		if _, there := left.Chain(name); there {
			t.Errorf("%s is left", name)
		}
	}
	cut := s
	cut.Jumps, cut.Chains = nil, nil
	for _, c := range s.Chains { // the jumps are gone, as in the middle of a DEL
		if c.Name != "CNI-HOSTPORT-DNAT" {
			cut.Chains = append(cut.Chains, c)
		}
	}
	if _, there := protect.Detach(cut, map[protect.Attachment]bool{first: true}).Chain("CNI-DN-46d5e6e569f30aa7e18e0"); there {
		t.Error("a chain that is known by its name only is left")
	}
	none := protect.Detach(left, map[protect.Attachment]bool{second: true})
	if c, there := none.Chain("CNI-HOSTPORT-DNAT"); !there || len(c.Rules) != 0 {
		t.Errorf("the chain that all share: %t with %d rules", there, len(c.Rules))
	}
	other := map[protect.Attachment]bool{{Network: "cbr1", Container: first.Container}: true}
	if d := cmp.Diff(s, protect.Detach(s, other)); d != "" {
		t.Errorf("another network's (-want +got):\n%s", d)
	}
}

// TestAttachmentOf: only comments of portmap and ipMasq name an attachment.
func TestAttachmentOf(t *testing.T) {
	for spec, want := range map[string]string{
		`-m comment --comment "name: \"net\" id: \"abc\"" -j CNI-1`:         "net abc",
		`-m comment --comment "dnat name: \"a-b\" id: \"c-d\"" -j CNI-DN-1`: "a-b c-d",
		`-m comment --comment "snat name: \"net\" id: \"abc\"" -j CNI-SN-1`: "net abc",
		`-m comment --comment "id: abc" -j CNI-1`:                           "",
		`-m comment --comment "dnat name: \"net\" id: \"" -j CNI-1`:         "",
		`-m comment --comment "say name: \"net\" id: \"abc\" too" -j CNI-1`: "",
		`-s 10.0.0.1/32 -j CNI-1`:                                           "",
	} {
		a, ok := protect.AttachmentOf(rules.Rule{Spec: spec, Target: "CNI-1"})
		if got := a.Network + " " + a.Container; ok != (want != "") || ok && got != want {
			t.Errorf("%s: %q, %t; want %q", spec, got, ok, want)
		}
	}
}
