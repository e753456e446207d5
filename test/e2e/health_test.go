package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// said is the health of a node, in the words of each of canaryd's faces.
type said struct {
	Status, JSON, Public, Watch string // the headline
	Healthy                     bool   // in JSON
	StatusCode, CheckCode       int
	Line                        string // of check
	Plugin                      string // of node-problem-detector
	PluginCode, AskedCode       int
	Ready, Asked                string // /readyz, and canaryd health ready
	ReadyCode                   int
	Metric                      float64
	Page                        string // its headline
}

var pageTitle = regexp.MustCompile(`<h1 id="verdict">([^<]*?)\s*(<|$)`)

// faces reads each face.
func faces(n *nodetest.Node) said {
	n.Helper()
	var s said
	first := func(text string) string { line, _, _ := strings.Cut(text, "\n"); return line }
	headline := func(text string) (string, bool) {
		var status struct {
			Headline string
			Healthy  bool
		}
		n.Must(json.Unmarshal([]byte(text), &status))
		return status.Headline, status.Healthy
	}
	code, text, _ := n.Canaryd("status")
	s.Status, s.StatusCode = first(text), code
	_, text, _ = n.Canaryd("status", "-o", "json")
	s.JSON, s.Healthy = headline(text)
	s.Public, _ = headline(n.Get("/api/v1/status"))
	s.CheckCode, text, _ = n.Canaryd("check", "-o", "line")
	s.Line = first(text)
	s.AskedCode, text, _ = n.Canaryd("health", "ready")
	s.Asked = first(text)
	s.PluginCode, text, _ = n.Exec(exec.CommandContext(n.Context(), "/bin/bash", "../../deploy/node-problem-detector/canaryd-check.sh"))
	s.Plugin = first(text)
	ready, err := nodetest.Fetch("/readyz")
	s.Ready, s.ReadyCode = first(ready), 200
	if err != nil {
		_, words, _ := strings.Cut(err.Error(), "503 Service Unavailable: ")
		s.Ready, s.ReadyCode = first(words), 503
	}
	n.Must(func() error { _, err := nodetest.Fetch("/healthz"); return err }()) // canaryd is alive on any node
	s.Metric = n.Metrics()["healthy{}"]
	if title := pageTitle.FindStringSubmatch(n.Get("/")); title != nil {
		s.Page = html.UnescapeString(title[1])
	}
	s.Watch = watched(n)
	return s
}

// watched returns the first line of status --watch, without its time.
func watched(n *nodetest.Node) string {
	n.Helper()
	cmd := exec.CommandContext(n.Context(), nodetest.Canaryd(), "status", "--watch")
	out, err := cmd.StdoutPipe()
	n.Must(err)
	n.Must(cmd.Start())
	lines := bufio.NewScanner(out)
	lines.Scan()
	first := lines.Text()
	n.Must(cmd.Process.Signal(os.Interrupt))
	for lines.Scan() {
		continue
	}
	n.Must(cmd.Wait())
	_, line, _ := strings.Cut(first, " ")
	return line
}

// bad is the output of all faces for a node that is not healthy.
func bad(problem, line, page string) said {
	headline := "NOT healthy: " + problem
	return said{Status: headline, JSON: headline, Public: headline, Watch: headline, StatusCode: 1, CheckCode: 1, Line: line, Plugin: line, PluginCode: 1,
		AskedCode: 1, Ready: problem, Asked: problem, ReadyCode: 503, Page: page}
}

// warned is their output for a healthy node with a warning.
func warned(warning, page string) said {
	headline := "healthy, but " + warning
	return said{Status: headline, JSON: headline, Public: headline, Watch: "H" + headline[1:], Healthy: true, Line: "intact: 6 tables, but " + warning, Plugin: "intact: 6 tables",
		Ready: "ok, but " + warning, Asked: "ok, but " + warning, ReadyCode: 200, Metric: 1, Page: page}
}

// closed is their output about a chain that a flusher has closed.
func closed(chain, does string, tables int) said {
	s := warned("policy of "+chain+" is DROP since flush 1; canaryd "+does, "Healthy, but policy of "+chain+" is DROP since flush 1; canaryd "+does)
	s.Plugin = fmt.Sprintf("intact: %d tables", tables)
	s.Line = s.Plugin + ", but see canaryd status"
	return s
}

// TestEveryFaceSaysTheSame: if a protected rule is lost and not back, for any
// reason, all faces must show an unhealthy node. They use the same words and the
// same exit codes. If an existing rule would not come back after a loss, all
// faces must show a warning.
func TestEveryFaceSaysTheSame(t *testing.T) {
	const (
		lostOne = "one rule was lost and could not be put back: ipv4 filter is partial"
		oneLine = "lost: ipv4 filter partial"
		onePage = "One rule was lost and could not be put back"
		nothing = "nothing is protected: no rule that --protect names or a file declares is in iptables' tables; " +
			"found instead: native nftables tables, which canaryd does not guard (ip docker-bridges, ip6 docker-bridges)"
	)
	both := []iptables.Backend{iptables.NFT, iptables.Legacy}
	for _, c := range []struct {
		name    string
		on      []iptables.Backend
		bare    bool // without rules to protect
		flags   []string
		before  func(n *nodetest.Node) // before canaryd starts
		want    said                   // the output then
		lose    func(n *nodetest.Node)
		after   said
		offline int // check's exit code without a daemon
	}{
		{name: "a rule in quarantine", on: both,
			before: func(n *nodetest.Node) {
				tool(n, rules.IPv4, "-N", "CORP-CANARY")
				tool(n, rules.IPv4, "-A", "KUBE-FORWARD", "-j", "CORP-CANARY")
			},
			lose: func(n *nodetest.Node) {
				restoreText(n, "*filter\n-F\n-X CORP-CANARY\nCOMMIT\n") // at once
			},
			after: bad(lostOne, oneLine, onePage), offline: 1},
		{name: "a chain that is left out", on: both, flags: []string{"--max-rules=1000"},
			before: func(n *nodetest.Node) {
				text := "*filter\n:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]\n-A KUBE-FORWARD -j KUBE-SVC-AAAAAAAAAAAAAAAA\n"
				for i := range 1200 {
					text += fmt.Sprintf("-A KUBE-SVC-AAAAAAAAAAAAAAAA -s 10.9.%d.%d/32 -j RETURN\n", i>>8, i&255)
				}
				restoreText(n, text+"COMMIT\n")
			},
			want:  warned("the rules of one chain are not guarded", "Healthy, but the rules of one chain are not guarded"),
			lose:  func(n *nodetest.Node) { tool(n, rules.IPv4, "-F") },
			after: bad(lostOne, oneLine, onePage), offline: 1},
		{name: "nothing protected", on: both[:1], bare: true, flags: []string{"--protect=kube,cni"},
			before: func(n *nodetest.Node) {
				nstest.Command(n.T, "nft", "add table ip docker-bridges; add table ip6 docker-bridges; add table ip kube-proxy")
			},
			lose: func(*nodetest.Node) {},
			after: said{Status: "NOT healthy: " + nothing, JSON: "NOT healthy: " + nothing, Public: "NOT healthy: " + nothing, Watch: "N" + nothing[1:], StatusCode: 1,
				Line: "nothing protected: no table holds a rule to guard; see canaryd status", Plugin: "intact: 7 tables",
				Ready: "ok, but " + nothing, Asked: "ok, but " + nothing, ReadyCode: 200, Page: "Nothing protected"}},
		{name: "a closed policy", on: both,
			before: func(n *nodetest.Node) { tool(n, rules.IPv4, "-P", "FORWARD", "ACCEPT") },
			lose: func(n *nodetest.Node) {
				nstest.Command(n.T, "sh", "-c", strings.ReplaceAll("iptables -F; iptables -X; iptables -P FORWARD DROP", "iptables", "iptables-"+string(n.Programs.With)))
			},
			after: closed("ipv4 filter FORWARD", "sets none", 6)},
		{name: "a closed policy of a native table", on: both[:1], flags: []string{"--protect=kube,nft:inet:fw"},
			before: func(n *nodetest.Node) { nstest.CommandInput(n.T, ownFirewall, "nft", "-f", "-") },
			lose: func(n *nodetest.Node) {
				nstest.Command(n.T, "nft", "flush table inet fw")
				nstest.Command(n.T, "nft", "chain inet fw fw3 { policy drop; }")
			},
			after: closed("inet fw fw3", "leaves it so", 7)},
	} {
		for _, backend := range c.on {
			t.Run(c.name+"/"+string(backend), func(t *testing.T) {
				nodetest.On(t, backend, func(n *nodetest.Node) {
					if !c.bare {
						n.Load()
					}
					c.before(n)
					start := n.Start
					if c.bare {
						start = n.Launch // the daemon has no generation yet
					}
					d := start(c.flags...)
					if c.want.Status != "" {
						settle(n, c.want)
					}
					c.lose(n)
					settle(n, c.after)
					// An unanswered flush alone must fire no alert.
					outcome := map[bool]string{false: "partial", true: "proved"}[c.after.Healthy]
					if s := n.Status(); !c.bare && (len(s.Flushes) != 1 || s.Flushes[0].Outcome != outcome) {
						n.Errorf("the records are %+v, want one record with outcome %s", s.Flushes, outcome)
					}
					d.Stop()
					n.Want(c.offline, "check")
				})
			})
		}
	}
}

// TestEveryFaceSaysOfADecision does the same for a loss that waits for a
// decision, and for a refused declared rule.
func TestEveryFaceSaysOfADecision(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		n.Start("--ip-family=ipv4").Stop()
		id := n.Stored()[0]
		tool(n, rules.IPv4, "-F")
		d := n.Launch("--max-stored-age=1ms", "--ip-family=ipv4")
		problem := "rules were lost while canaryd did not run (ipv4 filter emptied): `canaryd restore --generation " + id + "` puts them back, `canaryd dismiss` accepts the loss"
		settle(n, bad(problem, "lost: ipv4 filter emptied", "Rules missing since"))
		n.Want(0, "dismiss")
		d.Stop()

		n.Must(os.MkdirAll("/run/rules.d", 0o755))
		n.Must(os.WriteFile("/run/rules.d/corp.v4", []byte("*filter\n:CORP - [0:0]\n-A FORWARD -j CORP\n-A CORP -j NOSUCH\nCOMMIT\n"), 0o600))
		d = n.Launch("--rules-dir=/run/rules.d")
		problem = "ipv4 filter is not as declared: /run/rules.d/corp.v4:4 is refused: it jumps to a chain or target that does not exist"
		settle(n, bad(problem, "declared rules refused: ipv4 filter", "Declared rules refused since"))
		d.Stop()
	})
}

// settle waits until the node's headline is as wanted, and compares all faces.
func settle(n *nodetest.Node, want said) {
	n.Helper()
	n.Until("the headline "+want.Status, func() error {
		text, err := nodetest.Fetch("/api/v1/status")
		if err == nil && !strings.Contains(text, strings.ReplaceAll(want.Status, `"`, `\"`)) {
			line := regexp.MustCompile(`"headline": .*`).FindString(text)
			err = errors.New(line)
		}
		return err
	})
	got := faces(n)
	got.Watch, _, _ = strings.Cut(got.Watch, "; last flush")
	got.Watch = regexp.MustCompile(`: \d+ rules in \d+ chains(, and .* of native tables)?$`).ReplaceAllString(got.Watch, "")
	if diff := cmp.Diff(want, got); diff != "" {
		n.Errorf("the faces (-want +got)\n%s", diff)
	}
}

// ownFirewall is a table that a word names.
const ownFirewall = `table inet fw {
	chain input { type filter hook input priority 0; tcp dport 23 drop; tcp dport 24 drop; }
	chain fw3 { type filter hook forward priority 0; tcp dport 26 drop; }
}
`

// restoreText passes lines to iptables-restore --noflush for IPv4.
func restoreText(n *nodetest.Node, text string) {
	n.Helper()
	n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, text))
}
