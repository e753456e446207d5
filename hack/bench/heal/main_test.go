package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

func TestMain(m *testing.M) {
	if _, child := os.LookupEnv(marker); child {
		os.Exit(run(context.Background(), nil, os.Stdout, os.Stderr))
	}
	os.Exit(nodetest.Main(m))
}

// TestShort runs everything once at 100 services. Everything must be measured, and the rules
// that are back are compared with the rules before.
func TestShort(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "iptables-legacy", "nft")
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), []string{"-canaryd", nodetest.Canaryd(), "-short", "-o", "json"}, &stdout, &stderr); code != 0 {
			t.Fatalf("exit code %d\n%s", code, &stderr)
		}
		var got report
		if err := json.Unmarshal(stdout.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		measured := map[string]bool{}
		for _, s := range got.Series {
			measured[s.Backend+" "+s.Name] = true
			took := s.Seconds.Median > 0
			switch s.Name {
			case noticeRun: // it may be noticed before the flush command's end
				took = took || s.Seconds.Median == 0
			case healRun, busyHealRun:
				// The settle time begins with the notice. Rules of 100 services may be back as
				// soon as it is over, so that the heal takes no further time. Its memory was
				// measured.
				took = took || s.Seconds.Median == 0 && s.MiB.Median > 0
			}
			if s.Seconds.Count != 1 || !took || s.Services != 100 {
				t.Errorf("%s %s: %+v", s.Backend, s.Name, s)
			}
		}
		for _, title := range titles() {
			for _, backend := range []string{"nft", "legacy", ofNative} {
				if title.tool {
					backend = ""
				}
				if backend == "legacy" && title.what == kernelRun || backend == ofNative && nativeTitles()[title.what] == "" {
					continue // legacy has no transactions
				}
				if !measured[backend+" "+title.what] {
					t.Errorf("%s %s was not measured", backend, title.what)
				}
			}
		}
		if len(got.Targets) == 0 || got.Machine == "" {
			t.Errorf("no targets, or no machine: %+v", got)
		}
	})
}

// TestReport: there are two sizes, and the larger one takes twice as long as it should.
func TestReport(t *testing.T) {
	r := newReport(config{sizes: []int{1000, 5000}, backends: []iptables.Backend{iptables.NFT}, repetitions: 2})
	r.Machine = "a machine"
	for _, noise := range []float64{0.9, 1.1} {
		r.add("nft", 1000, Uses{healRun: {Seconds: 0.1 * noise, MiB: 20}, bareRun: {Seconds: 1 * noise}})
		r.add("nft", 5000, Uses{
			healRun:    {Seconds: 1 * noise, UserSeconds: 0.75, SystemSeconds: 0.5, MiB: 70},
			bareRun:    {Seconds: 10 * noise, UserSeconds: 5},
			restingRun: {Seconds: 1, MiB: 50},
		})
		r.add("", 5000, Uses{generateRun: {Seconds: 0.02}})
	}
	var b strings.Builder
	if err := r.write(&b); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"| ms, of services | nft, 1000 | nft, 5000 |",
		"| heal: flush's end to proof, without the settle time | 100 | 1000 |",
		"| iptables-restore --noflush, or nft -f, by hand | 1000 | 10000 |",
		"| ms, of services | 1000 | 5000 |",
		"| manifest: objects to rules | - | 20 |",
		"| at 5000 services | nft: CPU s | MiB |",
		"| heal: flush's end to proof, without the settle time | 1.25 | 70 |",
		"| canaryd at rest for 1 s | - | 50 |",
		"| nft     | heal: flush's end to proof, without the settle time | 100 ms (90.0 ms - 110 ms) | 1.00 s (900 ms - 1.10 s) | 1.43   | 0.75 + 0.50                  | 70  |",
		"| nft     | canaryd at rest for 1 s                              | -                         | 1.00 s (1.00 s - 1.00 s) | -      | -                            | 50  |",
		"|         | manifest: objects to rules                           | -                         | 20.0 ms (20.0 ms - 20.0 ms) |",
		"holds   0.1 of at most 0.7: nft: heal at 1000 services, of a bare iptables-nft-restore",
		"holds   0.1 of at most 0.2: nft: heal at 5000 services, of a bare iptables-nft-restore (0.25 by processor time)",
		"MISSED  10 of at most 6.5: nft: heal at 5000 services, of one at 1000",
		"holds   20 of at most 35: generation at 5000 services from parsed objects, ms",
		"holds   50 of at most 60: nft: resident memory of canaryd at rest at 5000 services, MiB",
		"MISSED  70 of at most 60: nft: its peak while it heals, MiB",
		"a machine; 2 repetitions;",
	} {
		if !strings.Contains(squeeze(b.String()), squeeze(line)) {
			t.Errorf("the report lacks the line\n%s\nof\n%s", line, &b)
		}
	}
}

// squeeze reduces several spaces in a row to one.
func squeeze(text string) string {
	for strings.Contains(text, "  ") {
		text = strings.ReplaceAll(text, "  ", " ")
	}
	return text
}

// TestData: the objects and options make as many rules as kube-proxy wrote.
func TestData(t *testing.T) {
	for _, services := range sizes() {
		objects, err := data(services, "objects.yaml")
		if err != nil {
			t.Fatal(err)
		}
		read, err := kube.Decode("objects.yaml", objects)
		if err != nil {
			t.Fatal(err)
		}
		g, _, err := kube.Generate(read, options(services))
		if err != nil {
			t.Fatal(err)
		}
		p, err := payload{}.write(t.TempDir(), services)
		if err != nil {
			t.Fatal(err)
		}
		if made := strings.Count(rules.Render(g, rules.IPv4), "\n-A "); made != p.rules {
			t.Errorf("%d services make %d rules, kube-proxy wrote %d", services, made, p.rules)
		}
	}
}

const saved = `*nat
:PREROUTING - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SEP-B - [0:0]
:KUBE-SEP-C - [0:0]
-A KUBE-SERVICES -j KUBE-SEP-B
-A KUBE-SEP-B -s 10.0.0.1 -j KUBE-MARK-MASQ
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80
-A KUBE-SEP-C -p tcp -m tcp -j DNAT --to-destination 10.0.0.2:80
-A PREROUTING -j KUBE-SERVICES
COMMIT
`

func TestPayloads(t *testing.T) {
	one, err := oneChain([]byte(saved))
	if err != nil {
		t.Fatal(err)
	}
	want := `*nat
:KUBE-SEP-B - [0:0]
-A KUBE-SEP-B -s 10.0.0.1 -j KUBE-MARK-MASQ
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.0.0.1:PORT
COMMIT
`
	if diff := cmp.Diff(want, one); diff != "" {
		t.Errorf("one endpoint's chain (-want +got):\n%s", diff)
	}
	want = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-SEP-C - [0:0]
:KUBE-SEP-B - [0:0]
-A KUBE-SERVICES -j KUBE-SEP-B
-A KUBE-SEP-B -s 10.0.0.1 -j KUBE-MARK-MASQ
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80
-A KUBE-SEP-C -p tcp -m tcp -j DNAT --to-destination 10.0.0.2:80
COMMIT
`
	if diff := cmp.Diff(want, rewrite([]byte(saved))); diff != "" {
		t.Errorf("a full sync (-want +got):\n%s", diff)
	}
	if _, err := oneChain([]byte("*nat\nCOMMIT\n")); err == nil {
		t.Error("rules without endpoints are no error")
	}
}

func TestBadFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"no data":       {[]string{"-sizes", "7"}, "-sizes 7: there is data for [100 1000 5000] services only"},
		"no backend":    {[]string{"-backends", "ebtables"}, "-backends ebtables: want nft, legacy or native"},
		"no repetition": {[]string{"-n", "0"}, "-n: want at least 1"},
		"no program":    {[]string{"-canaryd", "/nowhere"}, "there is no canaryd to measure"},
		"no output":     {[]string{"-canaryd", "/proc/self/exe", "-o", "xml"}, "-o xml: want table or json"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := run(t.Context(), tc.args, &stdout, &stderr); code != 2 || !strings.Contains(stderr.String(), tc.want) {
				t.Errorf("exit code %d, want 2 and %q:\n%s", code, tc.want, &stderr)
			}
		})
	}
}

// TestDocs: docs/measured.md has the tables of a whole run by the present program. Its numbers
// are from one run.
func TestDocs(t *testing.T) {
	docs, err := os.ReadFile("../../../docs/measured.md")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	whole := newReport(config{sizes: sizes(), backends: []iptables.Backend{iptables.NFT, iptables.Legacy, ofNative}})
	if err := whole.brief(&b); err != nil {
		t.Fatal(err)
	}
	text := squeeze(string(docs))
	for line := range strings.Lines(squeeze(b.String())) {
		want := strings.TrimSpace(line)
		if want == "" || strings.HasPrefix(want, "|--") {
			continue
		}
		if cells := strings.Split(want, "|"); !strings.Contains(cells[1], " services") { // not a head
			want = "|" + cells[1] + "|"
		}
		if !strings.Contains(text, want) {
			t.Errorf("docs/measured.md lacks the row %q: paste the tables of a new run", want)
		}
	}
	for _, title := range titles() { // the tables omit none of them
		if name := title.inBrief(); !strings.Contains(text, "| "+name+" |") {
			t.Errorf("docs/measured.md lacks the row %q", name)
		}
	}
}

// TestMedian: each part of a Use has a median of its own.
func TestMedian(t *testing.T) {
	got := median([]measure.Use{{Seconds: 3, MiB: 1}, {Seconds: 1, MiB: 3}, {Seconds: 2, MiB: 2}})
	if diff := cmp.Diff(measure.Use{Seconds: 2, MiB: 2}, got); diff != "" {
		t.Errorf("median (-want +got):\n%s", diff)
	}
}
