package iptables

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

var (
	counterPattern = regexp.MustCompile(`\[\d+:\d+\]`)
	commentPattern = regexp.MustCompile(`(?m)^#.*\n`)
)

// saveNFT returns the output of iptables-nft-save, without time and counters.
func saveNFT(t testing.TB, family rules.Family) string {
	t.Helper()
	text := runTool(t, "", program(NFT, family, "-save"))
	return counterPattern.ReplaceAllString(commentPattern.ReplaceAllString(text, ""), "[0:0]")
}

// runTool is nstest.Command, but also for benchmarks.
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

var namedLine = regexp.MustCompile(`[Ll]ine:? (\d+)`)

// namedLines returns the numbers of the lines that iptables-restore names as
// wrong, from 0 on.
func namedLines(err error) (lines []int) {
	if err == nil {
		return nil
	}
	for _, found := range namedLine.FindAllStringSubmatch(err.Error(), -1) {
		if n, err := strconv.Atoi(found[1]); err == nil {
			lines = append(lines, n-1)
		}
	}
	return lines
}

// restoreEach feeds pieces of a script to iptables-restore, each as a transaction
// of its own. It returns the refused pieces with the reasons. The program ends at
// the first refused piece, and the next call continues after it.
func restoreEach(t testing.TB, restore string, table rules.TableName, pieces []string) map[int]error {
	t.Helper()
	refused := map[int]error{}
	for next := 0; next < len(pieces); {
		var text strings.Builder
		var ends []int // the first line after each piece
		for _, piece := range pieces[next:] {
			fmt.Fprintf(&text, "*%s\n%sCOMMIT\n", table, piece)
			ends = append(ends, strings.Count(piece, "\n")+2)
			if n := len(ends); n > 1 {
				ends[n-1] += ends[n-2]
			}
		}
		_, err := tryTool(t, text.String(), restore, "--noflush", "-w", "5")
		if err == nil {
			break
		}
		lines := namedLines(err)
		if len(lines) == 0 || lines[0] >= ends[len(ends)-1] {
			t.Fatalf("%s does not say which line it refuses: %v", restore, err)
		}
		next += slices.IndexFunc(ends, func(end int) bool { return lines[0] < end })
		refused[next] = err
		next++
	}
	return refused
}

// A clusterText is the rules that kube-proxy wrote for a cluster. The generator's
// test data has 40 clusters.
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

// flushRuleset sends the one message of "nft flush ruleset" (1.0.6).
func flushRuleset(t testing.TB) {
	t.Helper()
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_DELTABLE, 0, unix.AF_UNSPEC)
	b.End()
	b.Finish()
	if err := b.Send(); err != nil {
		t.Fatal(err)
	}
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
