package iptables

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// learned is a rawSource that knows what stands in the kernel: the i-th raw
// rule of a chain is the i-th line that iptables-save prints of it.
type learned map[rules.Family]map[rules.Key]nft.Rule

func (l learned) raw(family rules.Family, rule rules.Rule, _ []byte) (nft.Rule, bool) {
	r, ok := l[family][rule.Key()]
	return r, ok
}

// learn adds what a family holds now.
func (l learned) learn(t testing.TB, conn *nft.Conn, family rules.Family) rules.Ruleset {
	t.Helper()
	set, unreadable, err := rules.Parse(strings.NewReader(saveNFT(t, family)))
	if err != nil || len(unreadable) > 0 {
		t.Fatal(err, unreadable)
	}
	if l[family] == nil {
		l[family] = map[rules.Key]nft.Rule{}
	}
	for table, content := range set {
		for _, chain := range content.Chains {
			i := 0
			err := conn.EachRule(family, table, chain.Name, func(m nft.RuleMessage) error {
				if i >= len(chain.Rules) {
					return errors.New("more rules than iptables-save prints")
				}
				l[family][chain.Rules[i].Key()] = m.Rule.Clone()
				i++
				return nil
			})
			if err != nil || i != len(chain.Rules) {
				t.Fatalf("%s %s: %d rules of %d: %v", table, chain.Name, i, len(chain.Rules), err)
			}
		}
	}
	return set
}

var (
	counterPattern = regexp.MustCompile(`\[\d+:\d+\]`)
	commentPattern = regexp.MustCompile(`(?m)^#.*\n`)
)

// saveNFT returns what iptables-nft-save prints, without time and counters.
func saveNFT(t testing.TB, family rules.Family) string {
	t.Helper()
	text := runTool(t, "", program(NFT, family, "-save"))
	return counterPattern.ReplaceAllString(commentPattern.ReplaceAllString(text, ""), "[0:0]")
}

// runTool is nstest.Command for benchmarks, too.
func runTool(t testing.TB, input, name string, args ...string) string {
	t.Helper()
	text, err := tryTool(t, input, name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// tryTool runs a program that may fail.
func tryTool(t testing.TB, input, name string, args ...string) (string, error) {
	t.Helper()
	c := command{path: name, args: args, stdin: strings.NewReader(input), timeout: defaultRestoreTimeout}
	res, err := c.run(t.Context())
	if err == nil && res.exit != 0 {
		err = exitError(name, res)
	}
	return string(res.stdout), err
}

// A clusterText is what kube-proxy wrote for one of the 40 clusters of the
// generator's test data.
type clusterText struct {
	family rules.Family
	text   string
}

func corpusTexts(t *testing.T) map[string]clusterText {
	t.Helper()
	f, err := os.Open("../rules/kube/testdata/kube-proxy-1.36.3.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	clusters := map[string]clusterText{}
	for files := tar.NewReader(z); ; {
		head, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		c := clusters[path.Dir(head.Name)]
		switch path.Base(head.Name) {
		case "expected.rules":
			c.text = string(content)
		case "options.json":
			c.family = rules.IPv4
			if bytes.Contains(content, []byte(`"ipFamily": "IPv6"`)) {
				c.family = rules.IPv6
			}
		}
		clusters[path.Dir(head.Name)] = c
	}
	if len(clusters) != 40 {
		t.Fatalf("the corpus has %d cases, not 40", len(clusters))
	}
	return clusters
}

func dialTest(t testing.TB) *nft.Conn {
	t.Helper()
	conn, err := nft.Dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// guardedBatch begins a batch for that genid.
func guardedBatch(genid uint32) *nft.Batch {
	b := nft.NewBatch()
	b.Guard(genid)
	return b
}

// restoreDirectly encodes a payload and sends it.
func restoreDirectly(k *Kernel, genid uint32, payload Payload) directResult {
	return k.sendDirectly(k.encode(payload), payload, genid, nil)
}
