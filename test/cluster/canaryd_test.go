//go:build cluster

package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// rolloutIn limits a rollout on this one node; --timeout is kubectl's.
const rolloutIn = "--timeout=180s"

// startDaemonSet installs canaryd as docs/install.md says.
func startDaemonSet(n *node) {
	started := time.Now()
	n.want("kubectl", "apply", "-k", n.kustomization("installed", "v1", []string{"base"}, nil))
	n.want("kubectl", "-n", "kube-system", "rollout", "status", "daemonset", "canaryd", rolloutIn)
	n.results.step("DaemonSet Running and Ready", time.Since(started))
	n.wantHealthy()
	inside, _, err := n.status("kubectl", "-n", "kube-system", "exec", n.pod(), "--")
	n.must(err)
	if inside.Generation.Rules == 0 {
		n.Error("canaryd status in the pod shows no rule that is protected")
	}
	backend := n.want("kubectl", "-n", "kube-system", "exec", n.pod(), "--", "canaryd", "detect")
	if !strings.Contains(backend, string(n.backend)) {
		n.Errorf("canaryd detect does not name the backend:\n%s", backend)
	}
}

// pod returns the name of canaryd's pod.
func (n *node) pod() string {
	n.Helper()
	name := n.want("kubectl", "-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=canaryd", "-o=jsonpath={.items[*].metadata.name}")
	if len(strings.Fields(name)) != 1 {
		n.Fatalf("the pods of canaryd: %q", name)
	}
	return name
}

// restarts returns how often canaryd's container was restarted.
func (n *node) restarts() string {
	n.Helper()
	return n.want("kubectl", "-n", "kube-system", "get", "pod", n.pod(), "-o=jsonpath={.status.containerStatuses[0].restartCount}")
}

// status returns canaryd's status from its socket, by the program on the host or by a program
// that other words start. The exit code 1 means "not healthy".
func (n *node) status(words ...string) (s scenario.Status, healthy bool, err error) {
	words = append(words, "canaryd", "status", "-o", "json")
	out, errs, err := n.run("", words[0], words[1:]...)
	if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		return s, false, err
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return s, false, fmt.Errorf("canaryd status printed %.200q: %w: %s", out, err, errs)
	}
	return s, s.Healthy, nil
}

func (n *node) wantHealthy() {
	n.Helper()
	n.until("canaryd to be healthy", func() error {
		s, healthy, err := n.status()
		if err == nil && (!healthy || s.Generation.Rules == 0) {
			err = fmt.Errorf("healthy %t, %d rules are protected", healthy, s.Generation.Rules)
		}
		return err
	})
}

// records returns the flush records that are younger than that time, the oldest first.
func (n *node) records(since time.Time) ([]scenario.Record, bool, error) {
	s, healthy, err := n.status()
	younger := slices.DeleteFunc(s.Flushes, func(r scenario.Record) bool { return !r.Time.After(since) })
	slices.Reverse(younger)
	return younger, healthy, err
}

// newest returns the time of the newest flush record.
func (n *node) newest() time.Time {
	n.Helper()
	s, _, err := n.status()
	n.must(err)
	if len(s.Flushes) == 0 {
		return time.Time{}
	}
	return s.Flushes[0].Time
}

// rules returns a line for each chain and each rule of both families, without canaryd's marks and
// the canaries of others.
func (n *node) rules() ([]string, error) {
	var lines []string
	for _, family := range rules.Families() {
		tables, err := scenario.Tables(n.Context(), n.programs(), family)
		if err != nil {
			return nil, err
		}
		for name, table := range tables {
			for _, chain := range table.Chains {
				if strings.HasSuffix(chain.Name, "-CANARY") {
					continue
				}
				where := fmt.Sprintf("%s %s %s", family, name, chain.Name)
				if !rules.Builtin(name, chain.Name) {
					lines = append(lines, where)
				}
				lines = append(lines, linesOf(where, chain)...)
			}
		}
	}
	slices.Sort(lines)
	return lines, nil
}
