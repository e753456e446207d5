package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/nodetest"
)

// A pluginConfig is a custom plugin monitor's configuration, with the fields
// that node-problem-detector's documentation (docs/custom_plugin_monitor.md)
// and its own types name.
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

// TestNodeProblemDetector: the configuration is one that node-problem-detector
// takes, and its plugin answers with the right exit code and a short line.
func TestNodeProblemDetector(t *testing.T) {
	var config pluginConfig
	decoder := json.NewDecoder(strings.NewReader(document(t, "deploy/node-problem-detector/canaryd.json")))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&config); err != nil {
		t.Fatal(err)
	}
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
	// node-problem-detector refuses a rule that may take longer than all.
	if own, all := duration(t, rule.Timeout), duration(t, config.Global.Timeout); own > all {
		t.Errorf("the rule may take %s, longer than %s", own, all)
	}

	nodetest.OnBoth(t, func(n *nodetest.Node) {
		check := func(wantCode int, want string) {
			n.Helper()
			args := append(slices.Clone(rule.Args), n.Flags("check")[1:]...)
			code, stdout, _ := n.Exec(exec.CommandContext(n.Context(), nodetest.Canaryd(), args...))
			if code != wantCode || !strings.HasPrefix(stdout, want) || strings.Count(stdout, "\n") != 1 {
				n.Errorf("%s %s: exit code %d, %q; want %d and one line that begins with %q", rule.Path, args, code, stdout, wantCode, want)
			}
			if length := len(strings.TrimSpace(stdout)); length > config.Global.MaxOutput || length == 0 {
				n.Errorf("%q has %d bytes, want 1 to %d", stdout, length, config.Global.MaxOutput)
			}
		}
		n.Load()
		check(2, "unknown: ") // no daemon, and there never was one
		d := n.Start("--mode=observe")
		check(0, "whole: ")
		n.Flush()
		check(1, "lost: ipv4 ") // mangle, or nat where mangle has its canary back already
		d.Stop()
		check(1, "lost: ")
		n.Must(os.WriteFile("/run/state/state.json", []byte("{"), 0o600))
		check(2, "unknown: ")
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
