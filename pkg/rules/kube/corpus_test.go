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
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A corpusCase is one cluster of testdata/kube-proxy-1.36.3.tar.gz.
type corpusCase struct {
	family   rules.Family
	options  Options
	objects  []byte
	expected rules.Ruleset
}

// corpus reads all cases, by name.
func corpus(t testing.TB) map[string]corpusCase {
	t.Helper()
	f, err := os.Open("testdata/kube-proxy-1.36.3.tar.gz")
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
			if c.expected, _, err = rules.Parse(bytes.NewReader(data)); err != nil {
				t.Fatalf("%s: %v", head.Name, err)
			}
		}
		cases[name] = c
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
		NodePortAddresses: c.NodePortAddresses,
	}
	switch mode, value, _ := strings.Cut(c.LocalDetection, ":"); mode {
	case "none":
	case "cidr":
		o.ClusterCIDRs = []string{value}
	case "bridge":
		o.DetectLocalMode, o.PodBridgeInterface = BridgeInterface, value
	case "prefix":
		o.DetectLocalMode, o.PodInterfaceNamePrefix = InterfaceNamePrefix, value
	default:
		t.Fatalf("local detection %q", c.LocalDetection)
	}
	return f, o
}

// TestCorpus compares with what kube-proxy 1.36.3 wrote, rule for rule: first
// the text, spelled as iptables-save would spell it, then what the rules mean.
func TestCorpus(t *testing.T) {
	cases := corpus(t)
	if len(cases) != 40 {
		t.Fatalf("%d cases, not 40", len(cases))
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			objects, err := Decode(name, c.objects)
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
				want := chains(c.expected[table], func(r rules.Rule) string { return saved(c.family, r.Spec) })
				got := chains(tableOf(t, g[c.family][table], table), func(r rules.Rule) string { return r.Spec })
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s (- kube-proxy, + ours):\n%s", table, diff)
				}
			}
		})
	}
}

// tableOf returns what a table holds once the section is loaded into it empty.
func tableOf(t *testing.T, s rules.Section, name rules.TableName) *rules.Table {
	t.Helper()
	text := rules.Render(rules.Generation{rules.IPv4: {name: s}}, rules.IPv4)
	for _, chain := range rules.BuiltinChains(name) {
		text = strings.Replace(text, "\n", "\n:"+chain+" ACCEPT [0:0]\n", 1)
	}
	set, _, err := rules.Parse(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return set[name]
}

// chains returns the rules of every chain. Where the order is left to chance,
// the rules of a service keep theirs and services are sorted.
func chains(table *rules.Table, spell func(rules.Rule) string) map[string][]string {
	all := map[string][]string{}
	for _, c := range table.Chains {
		specs := []string{}
		for _, r := range c.Rules {
			specs = append(specs, spell(r))
		}
		switch c.Name {
		case servicesChain, nodePortsChain, externalServicesChain, proxyFirewall:
			slices.SortStableFunc(specs, func(a, b string) int { return strings.Compare(subject(a), subject(b)) })
		}
		all[c.Name] = specs
	}
	return all
}

// subject returns the first word of a rule's comment and its protocol: the
// port of a service that the rule is about.
func subject(spec string) string {
	words, _ := rules.Split(spec)
	return strings.Fields(option(words, "--comment") + " -")[0] + " " + option(words, "-p")
}

func option(words []string, name string) string {
	if i := slices.Index(words, name); i >= 0 && i+1 < len(words) {
		return words[i+1]
	}
	return ""
}

// saved spells a rule of kube-proxy's as iptables-save would.
func saved(f rules.Family, spec string) string {
	words, err := rules.Split(spec)
	if err != nil {
		return err.Error()
	}
	head := map[string]string{}
	var matches, target string
	for i := 0; i < len(words); i++ {
		not := ""
		if words[i] == "!" {
			not = "! "
			i++
		}
		word := words[i]
		switch word {
		case "-d", "-s":
			head[word] = not + word + " " + prefixed(words[i+1])
			i++
		case "-i", "-p":
			head[word] = not + word + " " + words[i+1]
			i++
		case "--comment":
			matches += " --comment \"" + words[i+1] + `"`
			i++
		case "--mark":
			matches += " " + not + "--mark " + short(words[i+1])
			i++
		case "--probability":
			var n float64
			if _, err := jsonNumber(words[i+1], &n); err != nil {
				return err.Error()
			}
			matches += " --probability " + strings.TrimPrefix(probability(int(1/n+0.5)), " -m statistic --mode random --probability ")
			i++
		case "--name": // the last of recent's options
			chain := words[i+1]
			i += 2
			var rest []string
			for ; i < len(words) && words[i] != "-m" && words[i] != "-j"; i++ {
				rest = append(rest, words[i])
			}
			i--
			mask := "255.255.255.255"
			if f == rules.IPv6 {
				mask = strings.TrimSuffix(strings.Repeat("ffff:", 8), ":")
			}
			matches += " " + strings.Join(rest, " ") + " --name " + chain + " --mask " + mask + " --rsource"
		case "-j":
			target = " -j " + strings.Join(words[i+1:], " ")
			i = len(words)
		default:
			matches += " " + not + word
		}
	}
	target = strings.NewReplacer(" --xor-mark ", " --xor-mark ", " --or-mark ", " --or-mark ").Replace(target)
	if bit, found := strings.CutPrefix(target, " -j MARK --xor-mark "); found {
		target = " -j MARK --set-xmark " + short(bit) + "/0x0"
	}
	if bit, found := strings.CutPrefix(target, " -j MARK --or-mark "); found {
		target = " -j MARK --set-xmark " + short(bit) + "/" + short(bit)
	}
	if target == " -j REJECT" {
		target += map[rules.Family]string{rules.IPv4: " --reject-with icmp-port-unreachable", rules.IPv6: " --reject-with icmp6-port-unreachable"}[f]
	}
	text := ""
	for _, h := range []string{"-s", "-d", "-i", "-p"} {
		if head[h] != "" {
			text += " " + head[h]
		}
	}
	return strings.TrimPrefix(text+matches+target, " ")
}

func jsonNumber(text string, n *float64) (*float64, error) { return n, json.Unmarshal([]byte(text), n) }

// prefixed adds the length that iptables-save prints behind a lone address.
func prefixed(address string) string {
	switch {
	case strings.Contains(address, "/"):
		return address
	case strings.Contains(address, ":"):
		return address + "/128"
	default:
		return address + "/32"
	}
}

// short drops the leading zeros of marks.
func short(marks string) string {
	all := strings.Split(marks, "/")
	for i, m := range all {
		all[i] = "0x" + strings.TrimLeft(strings.TrimPrefix(m, "0x"), "0")
	}
	return strings.Join(all, "/")
}
