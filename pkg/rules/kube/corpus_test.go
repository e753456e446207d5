package kube

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"net/netip"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The clusters that testdata/README.md describes, and their number.
var archives = map[string]int{"kube-proxy-1.36.3": 40, "random-1.36.3": 100}

// A corpusCase is one cluster of an archive.
type corpusCase struct {
	family   rules.Family
	options  Options
	objects  []byte
	text     []byte // kube-proxy's output
	expected rules.Ruleset
}

// corpus reads an archive's cases, by name.
func corpus(t testing.TB, archive string) map[string]corpusCase {
	t.Helper()
	f, err := os.Open("testdata/" + archive + ".tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]corpusCase{}
	for files := tar.NewReader(z); ; {
		head, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		name := path.Dir(head.Name)
		c := cases[name]
		switch path.Base(head.Name) {
		case "objects.yaml":
			c.objects = data
		case "options.json":
			c.family, c.options = corpusOptions(t, data)
		case "expected.rules":
			c.text = data
			c.expected = savefile.Tables(t, string(data))
		}
		cases[name] = c
	}
	if len(cases) != archives[archive] {
		t.Fatalf("%s has %d cases, not %d", archive, len(cases), archives[archive])
	}
	return cases
}

// corpusOptions reads an options.json.
func corpusOptions(t testing.TB, data []byte) (rules.Family, Options) {
	t.Helper()
	var c struct {
		IPFamily, NodeName, LocalDetection string
		NodeIP                             netip.Addr
		MasqueradeAll, LocalhostNodePorts  bool
		RandomFully, ConntrackTCPBeLiberal bool
		MasqueradeBit                      int
		NodePortAddresses                  []string
		InterfaceAddrs                     []netip.Addr
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		t.Fatal(err)
	}
	f := rules.IPv4
	if c.IPFamily == "IPv6" {
		f = rules.IPv6
	}
	o := Options{
		Families: []rules.Family{f}, HostnameOverride: c.NodeName, NodeIPs: []netip.Addr{c.NodeIP},
		MasqueradeAll: c.MasqueradeAll, IPTablesMasqueradeBit: c.MasqueradeBit, RandomFully: c.RandomFully,
		ConntrackTCPBeLiberal: c.ConntrackTCPBeLiberal, IPTablesLocalhostNodePorts: c.LocalhostNodePorts,
		NodePortAddresses: c.NodePortAddresses, InterfaceAddrs: c.InterfaceAddrs,
	}
	switch mode, value, _ := strings.Cut(c.LocalDetection, ":"); mode {
	case "none":
	case "cidr":
		o.ClusterCIDRs = strings.Split(value, ",")
	case "bridge":
		o.DetectLocalMode, o.PodBridgeInterface = BridgeInterface, value
	case "prefix":
		o.DetectLocalMode, o.PodInterfaceNamePrefix = InterfaceNamePrefix, value
	default:
		t.Fatalf("local detection %q", c.LocalDetection)
	}
	return f, o
}

// TestCorpus compares the rules with kube-proxy 1.36.3's rules, rule by rule, in meaning and
// order.
func TestCorpus(t *testing.T) {
	for archive := range archives {
		for name, c := range corpus(t, archive) {
			t.Run(name, c.match)
		}
	}
}

func (c corpusCase) match(t *testing.T) {
	objects, err := Decode("objects.yaml", c.objects)
	if err != nil {
		t.Fatal(err)
	}
	g, _, err := Generate(objects, c.options)
	if err != nil {
		t.Fatal(err)
	}
	if err := rules.Validate(g); err != nil {
		t.Error(err)
	}
	for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
		compare(t, c.expected[table], tableOf(t, g[c.family.Table(table)], table))
	}
}

// compare requires the same chains with the same rules.
func compare(t *testing.T, want, got *rules.Table) {
	t.Helper()
	for _, c := range want.Chains {
		ours := got.Chain(c.Name)
		if ours == nil {
			t.Errorf("%s %s is missing", want.Name, c.Name)
			continue
		}
		if a, b := inOrder(c), inOrder(*ours); !rules.EqualRules(a, b) {
			t.Errorf("%s %s (- kube-proxy, + ours):\n%s", want.Name, c.Name, cmp.Diff(specs(a), specs(b)))
		}
	}
	for _, c := range got.Chains {
		if want.Chain(c.Name) == nil {
			t.Errorf("%s %s is one too many", want.Name, c.Name)
		}
	}
}

func specs(all []rules.Rule) []string {
	var texts []string
	for _, r := range all {
		texts = append(texts, r.Spec)
	}
	return texts
}

// tableOf returns the content of an empty table after the section was loaded into it.
func tableOf(t *testing.T, s rules.Section, name rules.TableName) *rules.Table {
	t.Helper()
	text := rules.Render(rules.Generation{rules.IPv4.Table(name): s}, rules.IPv4)
	for _, chain := range rules.BuiltinChains(name) {
		text = strings.Replace(text, "\n", "\n:"+chain+" ACCEPT [0:0]\n", 1)
	}
	set := savefile.Tables(t, text)
	return set[name]
}
