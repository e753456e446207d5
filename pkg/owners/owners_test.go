package owners

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestTheTableIsSound: each row must have a unique name and a source, and only possible names
// of chains.
func TestTheTableIsSound(t *testing.T) {
	names := map[string]bool{}
	for _, o := range All() {
		if names[o.Name] || o.Name == "" || o.Title == "" || o.Source == "" || !strings.HasPrefix(o.Docs, "https://") || o.Heals == "" || o.Breaks == "" {
			t.Errorf("the row %q is twice in the table, or lacks a title, a source, documents, or what it heals or breaks", o.Name)
		}
		names[o.Name] = true
		if o.Alone && o.Preset == "" {
			t.Errorf("%s is a word and in no preset", o.Name)
		}
		for _, c := range o.Chains {
			if len(c.Names) == 0 || (c.Emptied != EmptyOften) != (len(c.In) > 0) {
				t.Errorf("%s has chains %v that are emptied in %v", o.Name, c.Names, c.In)
			}
			for _, f := range c.Names {
				if err := f.check(); err != nil {
					t.Errorf("%s: %v", o.Name, err)
				}
			}
		}
		for _, s := range o.Straight {
			if (len(s.Words) == 0) == (s.Comment == "") || !slices.Contains([]string{"nat", "filter", "mangle", "raw"}, s.Table) || s.Chain != strings.ToUpper(s.Chain) {
				t.Errorf("%s has a rule %v in %s %s", o.Name, s.Words, s.Table, s.Chain)
			}
		}
		for _, table := range o.Tables {
			if table.Name == "" || len(table.Families) == 0 {
				t.Errorf("%s has a table %v", o.Name, table)
			}
		}
	}
}

// TestStraightSplitsAsRulesDoes: pkg/rules has the parser for iptables' quotes, but this
// package may not import it. So the test compares the words of the table with that parser's
// words.
func TestStraightSplitsAsRulesDoes(t *testing.T) {
	for _, o := range All() {
		for _, s := range o.Straight {
			if s.Comment != "" {
				continue
			}
			var quoted []string
			for _, word := range s.Words {
				quoted = append(quoted, rules.Quote(word))
			}
			text := strings.Join(quoted, " ")
			split, err := rules.Split(text)
			if d := cmp.Diff(s.Words, split); d != "" || err != nil {
				t.Errorf("%s: %s: %v (-want +got):\n%s", o.Name, text, err, d)
			}
			if d := cmp.Diff(s.Words, straight(s.Table, s.Chain, text)[0].Words); d != "" {
				t.Errorf("%s: %s (-want +got):\n%s", o.Name, text, d)
			}
		}
	}
}

// TestForm: single names, hashes of a fixed or any length, and globs.
func TestForm(t *testing.T) {
	for form, names := range map[string]map[string]bool{
		"DOCKER":             {"DOCKER": true, "DOCKER2": false, "": false},
		"KUBE-HP-<base32:4>": {"KUBE-HP-AB27": true, "KUBE-HP-AB2": false, "KUBE-HP-AB18": false, "KUBE-HP-": false, "XKUBE-HP-AB27": false},
		"CNI-DN-<hex>":       {"CNI-DN-0a": true, "CNI-DN-": false, "CNI-DN-0A": false},
		"f2b-*":              {"f2b-sshd": true, "f2b-": true, "xf2b-": false},
	} {
		for name, want := range names {
			if got := forms(form)[0].Matches(name); got != want {
				t.Errorf("%s matches %q: %t", form, name, got)
			}
		}
	}
	for _, bad := range []string{"", "A-<octal:2>", "A-*["} {
		if forms(bad)[0].check() == nil {
			t.Errorf("%q is taken for a form", bad)
		}
	}
}

// TestKubeProxys: a kubelet before 1.28 writes two of kube-proxy's chains.
func TestKubeProxys(t *testing.T) {
	for chain, want := range map[string]bool{
		"KUBE-SERVICES": true, "KUBE-SVC-XPGD46QRK7WJZT7O": true, "KUBE-IPVS-FILTER": true, "KUBE-MARK-MASQ": false,
		"KUBE-POSTROUTING": false, "KUBE-FIREWALL": false, "KUBE-MARK-DROP": false, "KUBE-ROUTER-INPUT": false, "DOCKER": false,
	} {
		if got := KubeProxys(chain); got != want {
			t.Errorf("%s: %t, want %t", chain, got, want)
		}
	}
}

// TestKubeRules: chains that a manifest claims, and chains of kubelet with any proxy.
func TestKubeRules(t *testing.T) {
	for chain, want := range map[string][2]bool{
		"KUBE-SERVICES": {true, false}, "KUBE-FW-XPGD46QRK7WJZT7O": {true, false}, "KUBE-XLB-XPGD46QRK7WJZT7O": {false, false},
		"KUBE-IPVS-FILTER": {false, false}, "KUBE-MARK-DROP": {true, true}, "KUBE-POSTROUTING": {true, true}, "KUBE-FIREWALL": {true, true},
		HintChain: {false, true}, KubeletCanary: {false, true}, ProxyCanary: {false, false}, "KUBE-ROUTER-INPUT": {false, false},
	} {
		if got := [2]bool{KubeRules(chain), Kubelets(chain)}; got != want {
			t.Errorf("%s: %v, want %v", chain, got, want)
		}
	}
}

// TestProcesses: who writes rules, who decides on its own, and who does neither.
func TestProcesses(t *testing.T) {
	for comm, want := range map[string][3]bool{ // writes, decides, is a CNI plugin
		"kube-proxy": {true, true, false}, "k3s-server": {true, true, false}, "k3s-agent": {true, true, false}, "dockerd": {true, true, false},
		"docker-proxy": {false, true, false}, "portmap": {true, true, true}, "ptp": {true, true, true}, "firewalld": {false, true, false},
		"pilot-agent": {false, true, false}, "bash": {}, "iptables": {}, "puppet": {}, "": {},
	} {
		if got := [3]bool{Writes(comm), Decides(comm), IsCNIPlugin(comm)}; got != want {
			t.Errorf("%s: %v, want %v", comm, got, want)
		}
	}
	for chain, want := range map[string]bool{"KUBE-SERVICES": true, "KUBE-ROUTER-INPUT": true, "FLANNEL-FWD": true, "CNI-FORWARD": false, "corp": false} {
		if got := WritesChain("k3s-server", chain); got != want {
			t.Errorf("k3s-server writes %s: %t", chain, got)
		}
	}
	if WritesTable("crio", tableid.IPv4.Table("kube-proxy")) || !WritesTable("k3s", tableid.IPv4.Table("kube-proxy")) || WritesTable("k3s", tableid.IPv4.Table("mine")) {
		t.Error("who writes which native table is not what the table says")
	}
	if !LoadsFile("nftables.service") || LoadsFile("docker.service") || LoadsFile("") {
		t.Error("which units load files is not what the table says")
	}
}
