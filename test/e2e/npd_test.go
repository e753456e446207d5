package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A pluginConfig is a custom plugin monitor's configuration.
// node-problem-detector's documentation (docs/custom_plugin_monitor.md) and its
// own types name the fields.
type pluginConfig struct {
	Plugin string `json:"plugin"`
	Global struct {
		InvokeInterval string `json:"invoke_interval"`
		Timeout        string `json:"timeout"`
		MaxOutput      int    `json:"max_output_length"`
		Concurrency    int    `json:"concurrency"`
		ByMessage      bool   `json:"enable_message_change_based_condition_update"`
		SkipInitial    bool   `json:"skip_initial_status"`
	} `json:"pluginConfig"`
	Source     string `json:"source"`
	Metrics    bool   `json:"metricsReporting"`
	Conditions []struct {
		Type    string `json:"type"`
		Reason  string `json:"reason"`
		Message string `json:"message"`
	} `json:"conditions"`
	Rules []struct {
		Type      string   `json:"type"`
		Condition string   `json:"condition"`
		Reason    string   `json:"reason"`
		Path      string   `json:"path"`
		Args      []string `json:"args"`
		Timeout   string   `json:"timeout"`
	} `json:"rules"`
}

// A plugin is the program that node-problem-detector executes for its condition.
type plugin struct {
	config pluginConfig
	// command returns the process of one check.
	command func(n *nodetest.Node) *exec.Cmd
	// asksDisk: it also answers without a daemon.
	asksDisk bool
}

// TestNodeProblemDetector: node-problem-detector accepts the configurations, and
// their plugins answer with the right exit code and a short line.
func TestNodeProblemDetector(t *testing.T) {
	program := pluginOf(t, "canaryd.json")
	script := pluginOf(t, "canaryd-daemonset.json")
	if diff := cmp.Diff(program.Conditions, script.Conditions); diff != "" {
		t.Errorf("the condition (-on the node +next to the DaemonSet):\n%s", diff)
	}
	plugins := []plugin{
		{program, func(n *nodetest.Node) *exec.Cmd {
			args := append(slices.Clone(program.Rules[0].Args), n.Flags("check")[1:]...)
			return exec.CommandContext(n.Context(), nodetest.Canaryd(), args...)
		}, true},
		{script, func(n *nodetest.Node) *exec.Cmd {
			file := "../../deploy/node-problem-detector/" + filepath.Base(script.Rules[0].Args[0])
			return exec.CommandContext(n.Context(), script.Rules[0].Path, file)
		}, false},
	}
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		check := func(daemon bool, wantCode int, want string) {
			n.Helper()
			for _, p := range plugins {
				if !daemon && !p.asksDisk {
					p.check(n, 2, "unknown: no canaryd that works answers at ")
				} else {
					p.check(n, wantCode, want)
				}
			}
		}
		n.Load()
		check(false, 2, "unknown: ") // no daemon has ever run
		d := n.Start("--mode=observe")
		check(true, 0, "intact: 6 tables")
		n.Flush()
		check(true, 1, "lost: ipv4 ") // mangle, or nat if mangle has its canary back already
		d.Stop()
		check(false, 1, "lost: ")
		n.Must(os.WriteFile("/run/state/state.json", []byte("{"), 0o600))
		check(false, 2, "unknown: ")
	})
}

// TestCheckScript tests the script with answers that a running canaryd seldom
// gives, and with other programs' answers.
func TestCheckScript(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	all := func(v canary.Verdict) map[rules.Family]api.Verdicts {
		verdicts := map[rules.Family]api.Verdicts{}
		for _, f := range rules.Families() {
			verdicts[f] = api.Verdicts{}
			for _, table := range protect.Always() {
				verdicts[f][table] = v
			}
		}
		return verdicts
	}
	partial := all(canary.Intact)
	partial[rules.IPv4][rules.Filter] = canary.Partial
	refused := all(canary.Intact)
	refused[rules.IPv4][rules.Nat] = "refused"
	for _, c := range []struct {
		name   string
		status any
		hangs  bool
		code   int
		line   string
	}{
		{name: "in force", status: api.Status{Healthy: true, Families: all(canary.Changed)}, line: "intact: 6 tables"},
		{name: "in a pause, nothing lost", status: api.Status{Paused: true, Families: all(canary.Intact)}, line: "intact: 6 tables"},
		{name: "all lost", status: api.Status{Families: all(canary.ChainDeleted), LossSince: at}, code: 1,
			line: "lost: ipv4 filter chain_deleted, ipv4 mangle chain_deleted and 4 more"},
		{name: "a loss that waits, its tables learned again", status: api.Status{Families: all(canary.Intact), LossSince: at}, code: 1,
			line: "lost: rules have been missing since 2026-01-02T03:04:05Z"},
		{name: "a rule that could not be put back", status: api.Status{Families: partial}, code: 1, line: "lost: ipv4 filter partial"},
		{name: "a declared rule that is refused", status: api.Status{Families: refused}, code: 1, line: "declared rules refused: ipv4 nat"},
		{name: "a native table lost its rules", status: api.Status{Families: all(canary.Intact), LossSince: at, Native: []api.NativeTable{
			{Family: "ip", Table: "ip kube-proxy", Verdict: canary.TableDeleted, Why: `a flush: "verdict": "x"`}, {Family: "ip6", Table: "ip6 kube-proxy", Verdict: canary.Intact}}},
			code: 1, line: "lost: ip kube-proxy table_deleted"},
		{name: "native tables stand", status: api.Status{Healthy: true, Families: all(canary.Intact), Native: []api.NativeTable{
			{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact}}}, line: "intact: 7 tables"},
		{name: "a native table is not read", status: api.Status{Families: all(canary.Intact), Native: []api.NativeTable{
			{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Unknown}}}, code: 2, line: "unknown: ip kube-proxy"},
		{name: "native tables were never read", status: api.Status{Families: all(canary.Intact), NativeError: "x"}, code: 2, line: "unknown: native tables"},
		{name: "not read", status: api.Status{Families: all(canary.Unknown)}, code: 2, line: "unknown: ipv4 filter, ipv4 mangle, ipv4 nat, ipv6 filter, ipv6 mangle and 1 more"},
		{name: "no family yet", status: api.Status{}, code: 2, line: "unknown: no table has been looked at yet"},
		{name: "cleaned up", status: api.Status{Stopped: true, Families: all(canary.Unknown)}, code: 2, line: "unknown: a cleanup removed the marks; restart canaryd"},
		{name: "a step hangs", status: api.Status{Healthy: true, Families: all(canary.Intact)}, hangs: true, code: 2, line: "unknown: no canaryd that works answers at HERE"},
		{name: "another program", status: []string{"hello"}, code: 2, line: "unknown: no table has been looked at yet"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/healthz" && c.hangs {
					w.WriteHeader(http.StatusServiceUnavailable)
				}
				if r.URL.Path == "/api/v1/status" {
					text, err := json.MarshalIndent(c.status, "", "  ") // in canaryd's format
					if err != nil {
						t.Error(err)
					}
					_, _ = w.Write(text)
				}
			}))
			defer server.Close()
			address := server.Listener.Addr().String()
			cmd := exec.CommandContext(t.Context(), "/bin/bash", "../../deploy/node-problem-detector/canaryd-check.sh", address)
			out, err := cmd.Output()
			if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if got := strings.ReplaceAll(string(out), address, "HERE"); got != c.line+"\n" || cmd.ProcessState.ExitCode() != c.code || len(out) > 81 {
				t.Errorf("exit code %d, %q; want %d, %q", cmd.ProcessState.ExitCode(), got, c.code, c.line)
			}
		})
	}
}

// pluginOf reads a custom plugin's configuration, and makes the same checks as
// node-problem-detector.
func pluginOf(t *testing.T, file string) pluginConfig {
	t.Helper()
	var config pluginConfig
	decode(t, file, &config)
	if config.Plugin != "custom" || config.Source == "" || len(config.Rules) != 1 || len(config.Conditions) != 1 {
		t.Fatalf("want a custom plugin with a source, one condition and one rule: %+v", config)
	}
	rule, condition := config.Rules[0], config.Conditions[0]
	if rule.Type != "permanent" || rule.Condition != condition.Type || rule.Reason == condition.Reason {
		t.Errorf("the rule %+v does not set the condition %+v", rule, condition)
	}
	if got := duration(t, config.Global.InvokeInterval); got <= duration(t, config.Global.Timeout) {
		t.Errorf("a check every %s may take longer than that", got)
	}
	// node-problem-detector refuses a rule whose time limit exceeds the global
	// one.
	if own, all := duration(t, rule.Timeout), duration(t, config.Global.Timeout); own > all {
		t.Errorf("the rule may take %s, longer than %s", own, all)
	}
	return config
}

func decode(t *testing.T, file string, into any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(document(t, "deploy/node-problem-detector/"+file)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func (p plugin) check(n *nodetest.Node, wantCode int, want string) {
	n.Helper()
	cmd := p.command(n)
	code, stdout, _ := n.Exec(cmd)
	if code != wantCode || !strings.HasPrefix(stdout, want) || strings.Count(stdout, "\n") != 1 {
		n.Errorf("%s: exit code %d, %q; want %d and one line that begins with %q", cmd, code, stdout, wantCode, want)
	}
	if length := len(strings.TrimSpace(stdout)); length > p.config.Global.MaxOutput || length == 0 {
		n.Errorf("%q has %d bytes, want 1 to %d", stdout, length, p.config.Global.MaxOutput)
	}
}

// A logConfig is a system log monitor's configuration, with the fields that
// node-problem-detector's own types name.
type logConfig struct {
	Plugin     string            `json:"plugin"`
	Config     map[string]string `json:"pluginConfig"`
	LogPath    string            `json:"logPath"`
	Lookback   string            `json:"lookback"`
	BufferSize int               `json:"bufferSize"`
	Source     string            `json:"source"`
	Metrics    bool              `json:"metricsReporting"`
	Conditions []struct{}        `json:"conditions"`
	Rules      []struct {
		Type    string `json:"type"`
		Reason  string `json:"reason"`
		Pattern string `json:"pattern"`
	} `json:"rules"`
}

// events returns the messages of the events that node-problem-detector makes of a
// log. It passes the lines one by one through the same steps as the translator
// and the buffer.
func (c logConfig) events(n *nodetest.Node, lines []string) []string {
	n.Helper()
	duration(n.T, c.Lookback)
	if c.BufferSize != 1 || c.Source == "" || len(c.Rules) != 1 || c.Rules[0].Type != "temporary" {
		n.Fatalf("want a source and one rule for single lines that makes events: %+v", c)
	}
	pattern := regexp.MustCompile(c.Rules[0].Pattern + `\z`)
	var events []string
	for _, line := range lines {
		message := strings.TrimSpace(line)
		if c.Plugin == "filelog" {
			found := regexp.MustCompile(c.Config["message"]).FindStringSubmatch(line)
			if found == nil {
				continue
			}
			message = found[len(found)-1]
			stamp := regexp.MustCompile(c.Config["timestamp"]).FindStringSubmatch(line)
			if _, err := time.ParseInLocation(c.Config["timestampFormat"], stamp[len(stamp)-1], time.Local); err != nil {
				n.Errorf("when it was: %v", err)
			}
		}
		if pattern.MatchString(message) {
			events = append(events, message)
		}
	}
	return events
}

// eventConfigs reads the configurations that make events of canaryd's log and of
// its flush records.
func eventConfigs(t *testing.T) (journald, file logConfig) {
	t.Helper()
	decode(t, "canaryd-flushes.json", &journald)
	decode(t, "canaryd-daemonset-flushes.json", &file)
	if journald.Plugin != "journald" || journald.Config["source"] != "canaryd" { // systemd's name for the unit's lines
		t.Errorf("%+v", journald)
	}
	if file.Plugin != "filelog" || file.LogPath != "/var/lib/canaryd/journal.jsonl" {
		t.Errorf("%+v", file)
	}
	return journald, file
}

// wantEvents wants as many events of each kind, each with these words.
func wantEvents(n *nodetest.Node, d *nodetest.Process, healed int, words ...string) {
	n.Helper()
	journald, file := eventConfigs(n.T)
	text, err := os.ReadFile("/run/state/journal.jsonl")
	n.Must(err) // it exists before the first flush
	for c, lines := range map[*logConfig][]string{&journald: strings.Split(d.Log(), "\n"), &file: strings.Split(string(text), "\n")} {
		events := c.events(n, lines)
		if len(events) != healed {
			n.Errorf("%s: %d events for %d healed flushes: %q of\n%s", c.Plugin, len(events), healed, events, strings.Join(lines, "\n"))
		}
		for _, event := range events {
			if len(event) > 1024 || strings.Contains(event, "command") {
				n.Errorf("%s: too long, or with a command line: %q", c.Plugin, event)
			}
			if slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(event, word) }) {
				n.Errorf("%s: %q lacks one of %q", c.Plugin, event, words)
			}
		}
	}
}

// TestNativeFlushesAreEvents: the event of a flush names the lost native tables,
// with or without tables of iptables.
func TestNativeFlushesAreEvents(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "nft")
		n.Load()
		nstest.CommandInput(n.T, "table ip kube-proxy { chain services { type nat hook prerouting priority dstnat; ip daddr 10.96.0.1 dnat to 10.0.0.1; }; }\n", "nft", "-f", "-")
		d := n.Start()
		n.Until("the native table to be guarded", func() error {
			if !strings.Contains(d.Log(), `"A native table is guarded"`) {
				return os.ErrNotExist
			}
			return nil
		})
		nstest.Command(n.T, "nft", "flush", "ruleset")
		n.Healed(1)
		nstest.Command(n.T, "nft", "flush", "table", "ip", "kube-proxy")
		n.Healed(2)
		d.Stop() // writes the journal
		wantEvents(n, d, 2, "ip kube-proxy")
	})
}

// TestFlushesAreEvents: a healed flush is one event of the node, on the node and
// next to the DaemonSet. An unhealed flush is none, and neither is a drill.
func TestFlushesAreEvents(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		wantEvents(n, d, 0)
		n.Want(0, "drill")
		n.Until("the drill's record to be on disk", func() error {
			if text, err := os.ReadFile("/run/state/journal.jsonl"); err != nil || !strings.Contains(string(text), `"outcome":"drilled"`) {
				return os.ErrNotExist
			}
			return nil
		})
		wantEvents(n, d, 0)
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Healed(2)
		d.Stop() // writes the journal
		wantEvents(n, d, 1, "ipv4 nat ")

		n.Must(os.Remove("/run/state/journal.jsonl"))
		d = n.Start("--mode=observe")
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Until("the loss to be noticed", func() error {
			if len(n.Status().Flushes) == 0 {
				return os.ErrNotExist
			}
			return nil
		})
		d.Stop()
		wantEvents(n, d, 0)
	})
}

func duration(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
