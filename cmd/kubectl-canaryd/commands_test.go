package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
)

// TestHelp: the help of each command fits a screen, and the plugin's own half a screen more.
func TestHelp(t *testing.T) {
	var all bytes.Buffer
	for _, c := range append([]command{{}}, commands()...) {
		var out bytes.Buffer
		args, most := []string{c.name, "--help"}, 24
		if c.name == "" {
			args, most = args[1:], 34
		}
		if code := run(context.Background(), args, streams{out: &out, err: &out}); code != exitOK {
			t.Errorf("%q: exit code %d", c.name, code)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) > most {
			t.Errorf("%q: %d lines, want at most %d", c.name, len(lines), most)
		}
		for _, line := range lines {
			if len(line) > helpWidth {
				t.Errorf("%q: %d columns: %s", c.name, len(line), line)
			}
		}
		fmt.Fprintf(&all, "$ kubectl canaryd %s\n%s\n", strings.TrimSpace(strings.Join(args, " ")), out.String())
	}
	golden.Compare(t, "help.golden", all.Bytes())
}

// TestBoundsOfAPause: a pause that canaryd would refuse reaches no node.
func TestBoundsOfAPause(t *testing.T) {
	for length, want := range map[time.Duration]bool{0: false, api.LeastPause - 1: false, api.LeastPause: true, api.MostPause: true, api.MostPause + 1: false} {
		o := options{}
		flags := o.flagSet(command{flags: []string{"for"}})
		err := flags.Parse([]string{"--for=" + length.String()})
		if err == nil {
			err = o.complete(flags)
		}
		if (err == nil) != want {
			t.Errorf("%s: %v", length, err)
		}
	}
}

// flushing adds nodes that were flushed.
func flushing(c *cluster) {
	for i, flushes := range [][]api.Flush{
		{flushOf("a1", "nft", "puppet.service", time.Hour), flushOf("a2", "nft", "puppet.service", 40*time.Hour)},
		{flushOf("b1", "nft", "puppet.service", 2*time.Hour), flushOf("b2", "iptables\x1b[2J", "", 3*time.Hour)},
		{},
		nil,
	} {
		s := healthy(460)
		s.Flushes = flushes
		if i == 2 {
			open := flushOf("c1", "firewalld", "firewalld.service", 50*time.Hour)
			open.AbsentSeconds, open.Outcome = 0, api.AwaitingDecision
			drill := flushOf("c2", "canaryd", "", time.Hour)
			drill.Drill = "canary"
			again := flushOf("c3", "nft", "puppet.service", 5*time.Hour)
			again.CulpritsLikely = true
			again.Repeated = &api.Repeated{Times: 36, Last: noon.Add(-4 * time.Hour)}
			s.Flushes = []api.Flush{drill, again, open}
		}
		c.node(fmt.Sprintf("node-%d", i), s)
	}
	full := healthy(460)
	for i := range api.KeptFlushes {
		full.Flushes = append(full.Flushes, flushOf(fmt.Sprint("d", i), "ufw", "ufw.service", 10*time.Hour+time.Duration(i)*time.Second))
	}
	c.node("often", full)
	c.pod("silent", waiting)
}

// TestFlushes: the table names the flushing programs and their nodes. Flushes of nodes without
// an answer are reported as unknown.
func TestFlushes(t *testing.T) {
	c := newCluster(t)
	flushing(c)
	code, out, said := c.run(0, "", "flushes", "--since=24h")
	if code != exitError {
		t.Errorf("exit code %d, want %d", code, exitError)
	}
	golden.Compare(t, "flushes.golden", []byte(someOften(out)+said))

	_, out, _ = c.run(0, "", "flushes", "-o", "json", "node-0", "node-2", "silent")
	golden.Compare(t, "flushes.json.golden", []byte(out))
	var reply struct{ Flushes []api.FlushLine }
	if err := json.Unmarshal([]byte(out), &reply); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range reply.Flushes {
		got = append(got, fmt.Sprintf("%s %s %s %t", f.Event, f.Node, f.ID, f.Final))
	}
	want := []string{"flush node-0 a1 true", "flush node-2 c2 true", "flush node-2 c3 true", "flush node-2 c1 false"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the lines of docs/architecture.md (-want +got):\n%s", diff)
	}
	if code, _, _ := c.run(0, "", "flushes", "node-0"); code != exitOK {
		t.Errorf("of a node that answers: exit code %d, want %d", code, exitOK)
	}
}

// TestTooManyFlushesOfANode: a node lists more flushes than canaryd keeps. It gets no more room
// than others, its newest flushes are listed, and the exit code says that there are more.
func TestTooManyFlushesOfANode(t *testing.T) {
	c := newCluster(t)
	s := healthy(460)
	for i := range 3 * api.KeptFlushes {
		s.Flushes = append(s.Flushes, flushOf(fmt.Sprint("d", i), "ufw", "", time.Hour-time.Duration(i)*time.Second))
	}
	c.node("often", s)
	code, out, _ := c.run(0, "", "flushes", "-o", "json")
	var reply struct {
		Flushes []api.FlushLine
		LeftOut int
	}
	if err := json.Unmarshal([]byte(out), &reply); err != nil {
		t.Fatal(err)
	}
	if code != exitError || len(reply.Flushes) != api.KeptFlushes || reply.LeftOut != 2*api.KeptFlushes || reply.Flushes[0].ID != "d299" {
		t.Errorf("exit code %d, %d flushes from %s on, %d left out", code, len(reply.Flushes), reply.Flushes[0].ID, reply.LeftOut)
	}
}

// someOften removes most rows of the node that is flushed often.
func someOften(out string) string {
	n := 0
	var lines []string
	for _, line := range strings.Split(out, "\n") {
		if strings.Contains(line, "  often ") {
			if n++; n > 2 {
				continue
			}
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// TestDetect: nodes with rules in both backends are listed first.
func TestDetect(t *testing.T) {
	c := newCluster(t)
	evidence := func(backend string, nft, legacy int, mixed bool) string {
		return fmt.Sprintf(`{"backend":%q,"reason":"nft has more rules","mixed":%t,"counts":{"ipv4":{"nft":{"rules":%d,"hint":true},"legacy":{"rules":%d,"hint":false}}},"native":[{"table":"ip kube-proxy","guarded":true}],
			"unguarded":[{"family":"ipv4","table":"filter","chain":"mine","rules":2,"word":"[m]ine"},{"family":"ipv4","table":"filter","chain":"ufw-x","rules":1,"manager":"ufw"}],
			"notGuarded":{"chains":1,"rules":7,"tables":1}}`,
			backend, mixed, nft, legacy)
	}
	c.write(c.pod("a", running), "detect", 0, evidence("nft", 460, 0, false), "")
	c.write(c.pod("b", running), "detect", 0, evidence("nft", 460, 3, true), "")
	c.write(c.pod("c", running), "detect", 0, strings.Replace(evidence("legacy", 0, 460, false), `"notGuarded"`, `"unguardedUnknown":["ipv4 nat: x"],"notGuarded"`, 1), "canaryd: warning: Linux 4.14 was never tried\x1b[2J\n")
	c.write(c.pod("d", running), "detect", 0, evidence("\x1b[2J", 0, 460, false), "")
	c.write(c.pod("e", running), "detect", 2, "", "canaryd: operation not permitted\ncommand terminated with exit code 2\n")
	older, _, _ := strings.Cut(evidence("nft", 460, 0, false), `,
			"notGuarded"`)
	c.write(c.pod("f", running), "detect", 0, older+"}", "") // from a canaryd without these counts
	code, out, said := c.run(5, "", "detect")
	if code != exitError {
		t.Errorf("exit code %d, want %d", code, exitError)
	}
	golden.Compare(t, "detect.golden", []byte(out+said))
	_, out, _ = c.run(5, "", "detect", "-o", "json", "b", "e")
	golden.Compare(t, "detect.json.golden", []byte(out))
	for args, want := range map[string]int{"a c": exitOK, "a b": exitNo} {
		if code, _, _ := c.run(5, "", append([]string{"detect"}, strings.Fields(args)...)...); code != want {
			t.Errorf("detect %s: exit code %d, want %d", args, code, want)
		}
	}
}

// pausing makes a cluster of three nodes; some take a pause.
func pausing(t *testing.T) *cluster {
	c := newCluster(t)
	for _, name := range []string{"a", "b"} {
		pod := c.pod(name, running)
		c.write(pod, "pause", 0, fmt.Sprintf(`{"wasPaused":%t,"until":"2026-11-27T12:30:00Z"}`, name == "b"), "")
		c.write(pod, "resume", 0, `{"wasPaused":true}`, "")
	}
	pod := c.pod("c", running)
	c.write(pod, "pause", 0, `{}`, "")
	c.write(pod, "resume", 1, "", "Error from server: error dialing backend\n")
	return c
}

// executed returns the command lines that ran in pods.
func (c *cluster) executed() []string {
	c.Helper()
	var all []string
	for _, call := range c.calls() {
		if strings.Contains(call, `"exec"`) {
			_, words, _ := strings.Cut(call, `"--container=canaryd" `)
			all = append(all, words)
		}
	}
	return all
}

// TestPauseAsks: no node gets a request before the user has agreed to the list.
func TestPauseAsks(t *testing.T) {
	for _, test := range []struct {
		name, input string
		args        []string
		want        int
		runs        int
	}{
		{"yes", "y\n", []string{"pause", "a", "b"}, exitOK, 2},
		{"yes, in full", "Yes\n", []string{"resume", "a", "b"}, exitOK, 2},
		{"no", "n\n", []string{"pause", "a", "b"}, exitError, 0},
		{"nothing", "\n", []string{"pause", "a", "b"}, exitError, 0},
		{"the end of the input", " ", []string{"resume", "a", "b"}, exitError, 0},
		{"no terminal", "", []string{"pause", "a", "b"}, exitError, 0},
		{"--yes", "", []string{"pause", "a", "b", "--yes"}, exitOK, 2},
		{"all", "", []string{"pause", "--all", "--yes"}, exitError, 3},
		{"no nodes", "y\n", []string{"pause"}, exitError, 0},
		{"too long", "y\n", []string{"pause", "a", "--for=25h"}, exitError, 0},
		{"too long a reason", "y\n", []string{"pause", "a", "--why=" + strings.Repeat("x", api.MostWhy)}, exitError, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := pausing(t)
			c.status("canaryd-0000", healthy(1))
			code, out, said := c.run(3, test.input, test.args...)
			if code != test.want {
				t.Errorf("exit code %d, want %d\n%s%s", code, test.want, out, said)
			}
			runs := 0
			if test.name != "no nodes" && !strings.HasPrefix(test.name, "too long") {
				runs = len(c.executed())
			}
			if runs != test.runs {
				t.Errorf("%d commands were run in pods, want %d", runs, test.runs)
			}
		})
	}
}

// TestPause: the table has the end of each pause; a node whose answer is missing may be paused.
func TestPause(t *testing.T) {
	c := pausing(t)
	code, out, said := c.run(3, "y\n", "pause", "--all", "--for=30m", "--why=drain the rack")
	if code != exitError {
		t.Errorf("exit code %d, want %d", code, exitError)
	}
	golden.Compare(t, "pause.golden", []byte(said+"--- stdout\n"+out))
	want := `"canaryd-0000" "--" "canaryd" "pause" "--for=30m0s" "--why=drain the rack (kubectl canaryd, alice)" "-o" "json"]`
	if got := strings.Join(c.executed(), "\n"); !strings.Contains(got, want) {
		t.Errorf("%s\nwas not run:\n%s", want, got)
	}
	_, out, said = c.run(3, "y\n", "resume", "--all")
	golden.Compare(t, "resume.golden", []byte(said+"--- stdout\n"+out))
	_, out, _ = c.run(3, "", "resume", "--all", "--yes", "-o", "json")
	golden.Compare(t, "resume.json.golden", []byte(out))
}

// TestInterrupted: after Ctrl-C the nodes without a query are unknown.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	f := &fleet{options: &options{parallel: 1}, nodes: []node{{name: "a"}, {name: "b"}, {name: "c"}}}
	var got []string
	askAll(ctx, f, streams{err: &bytes.Buffer{}}, func(ctx context.Context, n node) (string, error) {
		err := ctx.Err()
		if n.name == "a" {
			cancel()
		}
		return n.name, err
	}, func(n node, answer string, err error) { got = append(got, fmt.Sprint(answer, " ", err)) })
	want := []string{"a <nil>", "b context canceled", "c context canceled"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if a := (kubectl{program: "kubectl"}).run(ctx, 1, "x"); a.failed() == nil || a.failed().Error() != "interrupted" {
		t.Errorf("kubectl after Ctrl-C: %v", a.failed())
	}
}

// TestProgress: a terminal has one line that disappears, and a log has a line for each tenth.
func TestProgress(t *testing.T) {
	for _, watched := range []bool{true, false} {
		var out bytes.Buffer
		p := progress{to: streams{err: &out, watched: watched}, total: 3000}
		for i := range p.total {
			var err error
			if i%1000 == 0 {
				err = context.Canceled
			}
			p.add(err)
		}
		p.end()
		golden.Compare(t, fmt.Sprintf("progress-%t.golden", watched), bytes.ReplaceAll(out.Bytes(), []byte("\r"), []byte("\n")))
	}
}

// FuzzAnswers: no answer of a node makes a healthy row without a healthy status, harms a
// terminal, or ends the program.
func FuzzAnswers(f *testing.F) {
	for _, s := range []api.Status{healthy(460), lost(1), {}} {
		s.Flushes = []api.Flush{flushOf("1", "nft", "x.service", time.Hour)}
		text, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, 0, "")
		f.Add(text, 1, "command terminated with exit code 1")
	}
	f.Add([]byte(`{"backend":"nft","counts":{"ipv4":{"nft":{"rules":1}}},"native":[{}]}`), 0, "canaryd: warning: \x1b[2J")
	f.Add([]byte(`{"wasPaused":true,"until":"2026-11-27T12:30:00Z"}`), 0, "")
	f.Add([]byte(`{"kind":"PodList","items":[{"metadata":{"name":"x"},"status":{"containerStatuses":[{"name":"canaryd","state":{"running":{}}}]}}]}`), 0, "")
	f.Fuzz(func(t *testing.T, out []byte, code int, said string) {
		a := answer{out: out, code: code, said: said}
		n := node{name: said, pod: said}
		s, h, err := statusOf(a)
		row := rowOf(n, s, h, err, noon)
		if row.Healthy && (err != nil || !s.Healthy || code != 0 || row.State != api.StateHealthy) {
			t.Errorf("%+v is healthy: %v", row, err)
		}
		var shown strings.Builder
		reply := statusReply{States: map[api.HealthState]int{}}
		reply.add(row)
		writeFleet(&shown, reply)
		flushes := flushesReply{}
		for _, flush := range recent(s.Flushes, noon) {
			flushes.rows = append(flushes.rows, flushRowOf(said, flush, noon))
			if text, err := flushJSON(said, flush, noon); err == nil && len(text) > mostFlushLine {
				t.Errorf("a line of %d bytes", len(text))
			}
		}
		writeFlushes(&shown, &options{}, flushes)
		if row, err := detectRowOf(n, a); err == nil {
			writeDetected(&shown, detectReply{Nodes: []detectRow{row}}, 0)
		}
		if row, err := pauseRowOf(n, a, true); err == nil {
			writePaused(&shown, pauseReply{Nodes: []pauseRow{row}})
		}
		if pods, _, err := readList(out, "PodList"); err == nil {
			for name, n := range nodesOf(pods, "canaryd") {
				if n.why == "" && !isName(n.pod) {
					t.Errorf("the pod %q of %q would be asked", n.pod, name)
				}
				shown.WriteString(cell(name) + cell(n.why))
			}
		}
		if i := strings.IndexFunc(shown.String(), func(r rune) bool { return r != '\n' && (r < ' ' || r == 0x7f || r == 0x9b) }); i >= 0 {
			t.Errorf("a terminal gets %q", shown.String()[i:])
		}
	})
}
