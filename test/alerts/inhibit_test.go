package alerts

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const inhibitFile = "../../deploy/prometheus/alertmanager.inhibit.yaml"

// An inhibition is one of Alertmanager's inhibit_rules.
type inhibition struct {
	Source []matcher `json:"source_matchers"`
	Target []matcher `json:"target_matchers"`
	Equal  []string  `json:"equal"`
}

// A matcher is NAME = VALUE or NAME =~ "REGEXP", which is anchored.
type matcher string

func (m matcher) parts(t *testing.T) (label string, value *regexp.Regexp) {
	t.Helper()
	found := regexp.MustCompile(`^(\w+) (=|=~) "?([\w|]+)"?$`).FindStringSubmatch(string(m))
	if found == nil || found[2] == "=" && strings.Contains(found[3], "|") {
		t.Fatalf("%q is no matcher that this test knows", m)
	}
	return found[1], regexp.MustCompile("^(?:" + found[3] + ")$")
}

// labels are the labels of a firing alert.
type labels map[string]string

func (l labels) match(t *testing.T, all []matcher) bool {
	t.Helper()
	return !slices.ContainsFunc(all, func(m matcher) bool {
		label, value := m.parts(t)
		return !value.MatchString(l[label])
	})
}

// mutes reports whether a firing source silences target by Alertmanager's rules: a missing
// label is an empty one.
func (i inhibition) mutes(t *testing.T, source, target labels) bool {
	t.Helper()
	return source.match(t, i.Source) && target.match(t, i.Target) &&
		!slices.ContainsFunc(i.Equal, func(label string) bool { return source[label] != target[label] })
}

func inhibitions(t *testing.T) []inhibition {
	t.Helper()
	var file struct {
		Rules []inhibition `json:"inhibit_rules"`
	}
	decode(t, inhibitFile, &file)
	return file.Rules
}

// TestInhibitionsMuteLessSevereOnly: the inhibitions name existing alerts. None mutes a more
// severe alert, and no two mute each other.
func TestInhibitionsMuteLessSevereOnly(t *testing.T) {
	t.Parallel()
	// From kube-prometheus, where both are warnings, and routed as an operator likes.
	severity := map[string]string{"KubeNodeNotReady": "warning", "KubeNodeUnreachable": "warning"}
	for _, a := range alerts(t) {
		severity[a.Alert] = a.Labels["severity"]
	}
	named := func(m []matcher) (names []string) {
		for _, one := range m {
			_, value := one.parts(t)
			names = strings.Split(strings.Trim(value.String(), "^(?:)$"), "|")
		}
		return names
	}
	ranks := []string{"info", "warning", "critical"}
	muted := map[[2]string]bool{}
	for _, rule := range inhibitions(t) {
		for _, source := range named(rule.Source) {
			for _, target := range named(rule.Target) {
				if severity[source] == "" || severity[target] == "" {
					t.Errorf("%s mutes %s: one of them is no alert", source, target)
				}
				if slices.Index(ranks, severity[source]) < slices.Index(ranks, severity[target]) {
					t.Errorf("%s (%s) mutes %s (%s)", source, severity[source], target, severity[target])
				}
				if muted[[2]string{target, source}] || source == target {
					t.Errorf("%s and %s mute each other", source, target)
				}
				muted[[2]string{source, target}] = true
			}
		}
	}
}

// TestInhibitions: several alerts fire at the same time, and Alertmanager sends some of them.
func TestInhibitions(t *testing.T) {
	t.Parallel()
	on := func(name, node string, more ...string) labels {
		l := labels{"alertname": name, "cluster": "one", "job": "kube-system/canaryd"}
		if node != "" {
			l["instance"], l["node"] = node, node
		}
		for i := 0; i+1 < len(more); i += 2 {
			l[more[i]] = more[i+1]
		}
		return l
	}
	kube := func(name, node string) labels {
		return labels{"alertname": name, "cluster": "one", "job": "kube-state-metrics", "instance": "10.0.0.1:8080", "node": node}
	}
	for _, c := range []struct {
		name   string
		firing []labels
		sent   []string
	}{
		{"canaryd is down on many nodes",
			[]labels{on("CanarydDownOnManyNodes", ""), on("CanarydDown", "a"), on("CanarydDown", "b"), on("CanarydDown", "z", "cluster", "two")},
			[]string{"CanarydDownOnManyNodes", "CanarydDown z"}},
		{"a bad job is rolled out",
			[]labels{on("CanarydFlushesOnManyNodes", ""), on("CanarydFlush", "a"), on("CanarydFlushesRepeated", "b"), on("CanarydRulesAbsent", "b")},
			[]string{"CanarydFlushesOnManyNodes", "CanarydRulesAbsent b"}},
		{"a node is gone; canaryd is down on another",
			[]labels{kube("KubeNodeNotReady", "a"), on("CanarydDown", "a"), on("CanarydDown", "b")},
			[]string{"KubeNodeNotReady a", "CanarydDown b"}},
		{"a node is gone, and canaryd's series have no label node",
			[]labels{kube("KubeNodeNotReady", "a"), on("CanarydDown", "a", "node", "")},
			[]string{"KubeNodeNotReady a", "CanarydDown a"}},
		{"a loss that waits for a decision; another node's loss",
			[]labels{on("CanarydAwaitingDecision", "a"), on("CanarydRulesAbsent", "a"), on("CanarydReplayPartial", "a", "family", "ipv4"), on("CanarydRulesAbsent", "b")},
			[]string{"CanarydAwaitingDecision a", "CanarydRulesAbsent b"}},
		{"rules cannot be put back",
			[]labels{on("CanarydRulesAbsent", "a"), on("CanarydReplayFailed", "a", "family", "ipv4"), on("CanarydFlush", "a"), on("CanarydBlind", "a")},
			[]string{"CanarydRulesAbsent a", "CanarydBlind a"}},
		{"the backend changed",
			[]labels{on("CanarydBackendMismatch", "a"), on("CanarydMixedBackends", "a"), on("CanarydNothingProtected", "a"), on("CanarydGenerationShrunk", "a")},
			[]string{"CanarydBackendMismatch a"}},
		{"a writers' war",
			[]labels{on("CanarydContended", "a"), on("CanarydFlushesRepeated", "a"), on("CanarydFlush", "a")},
			[]string{"CanarydContended a", "CanarydFlushesRepeated a"}},
	} {
		var sent []string
		for i, target := range c.firing {
			muted := slices.ContainsFunc(inhibitions(t), func(rule inhibition) bool {
				for j, source := range c.firing {
					if i != j && rule.mutes(t, source, target) {
						return true
					}
				}
				return false
			})
			if !muted {
				node := target["node"]
				if node == "" {
					node = target["instance"]
				}
				sent = append(sent, strings.TrimSpace(target["alertname"]+" "+node))
			}
		}
		if diff := cmp.Diff(c.sent, sent); diff != "" {
			t.Errorf("%s: sent (-want +got):\n%s", c.name, diff)
		}
	}
}
