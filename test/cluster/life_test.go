//go:build cluster

package cluster

import (
	"errors"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// tryRollout updates the DaemonSet, and flushes while a node has no canaryd.
func tryRollout(n *node) {
	n.settled()
	before, err := n.rules()
	n.must(err)
	since := n.newest()
	started := time.Now()
	n.want("kubectl", "apply", "-k", n.kustomization("updated", "v2", []string{"base"}, nil))
	n.want("kubectl", "-n", "kube-system", "rollout", "status", "daemonset", "canaryd", rolloutIn)
	n.results.step("rollout of another image", time.Since(started))
	n.wantHealthy()
	image := n.want("kubectl", "-n", "kube-system", "get", "pod", n.pod(), "-o=jsonpath={.spec.containers[0].image}")
	if image != imageName+":v2" {
		n.Errorf("after the rollout the pod's image is %s", image)
	}
	n.same("after a rollout", before)
	if records, _, err := n.records(since); err != nil || len(records) != 0 {
		n.Errorf("after a rollout there are %d flush records (%v)", len(records), err)
	}

	// The next canaryd finds a loss that none saw.
	n.want("kubectl", "-n", "kube-system", "delete", "pod", n.pod(), "--wait=false")
	n.until("the old canaryd to end", func() error {
		if _, _, err := n.status(); err == nil {
			return errors.New("it answers")
		}
		return nil
	})
	flushed := time.Now()
	n.must(n.flushAll())
	if _, _, err := n.status(); err == nil {
		n.Error("the next canaryd was there before the flush had ended: the flush tried nothing")
	}
	n.until("the next canaryd", func() error { _, _, err := n.status(); return err })
	for _, r := range n.wholeAgain(before, since, false) {
		if r.Outcome != "proved" {
			n.Errorf("the flush while there was no canaryd ended %q", r.Outcome)
		}
	}
	n.results.step("flush between two pods, until healed", time.Since(flushed)-quietFor)
	n.want("kubectl", "-n", "kube-system", "rollout", "status", "daemonset", "canaryd", rolloutIn)
	n.wantAnswers()
}

// tryDrain drains the node, flushes, and uncordons the node.
func tryDrain(n *node) {
	n.settled()
	full, err := n.rules()
	n.must(err)
	since := n.newest()
	started := time.Now()
	n.want("kubectl", "drain", nodeName, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
	n.results.step("drain", time.Since(started))
	n.pod() // the pod stays
	n.settled()
	drained, err := n.rules()
	n.must(err)
	if portmap := hostPorts(drained); len(portmap) > 0 {
		n.Errorf("a drained node has host ports:\n%s", strings.Join(portmap, "\n"))
	}
	if len(hostPorts(full)) == 0 || len(drained) >= len(full) {
		n.Errorf("the drain took nothing: %d lines before, %d after", len(full), len(drained))
	}
	if records, _, err := n.records(since); err != nil || len(records) != 0 {
		n.Errorf("of a drain there are %d flush records (%v)", len(records), err)
	}
	n.must(n.flushAll())
	n.wholeAgain(drained, since, false)
	n.want("kubectl", "uncordon", nodeName)
	n.wantAnswers()
	n.settled()
	n.wantHealthy()
}

// hostPorts returns the lines of chains that portmap writes for single pods.
func hostPorts(lines []string) []string {
	var all []string
	for _, line := range lines {
		if strings.Contains(line, " CNI-DN-") {
			all = append(all, line)
		}
	}
	return all
}

// tryRemoval removes canaryd as docs/fleet.md says.
func tryRemoval(n *node) {
	before, err := n.rules()
	n.must(err)
	if len(n.traces()) == 0 {
		n.Fatal("no mark of canaryd's is seen while it runs")
	}
	started := time.Now()
	leaving := n.kustomization("leaving", "v2", []string{"base"}, []string{"components/uninstall"})
	n.want("kubectl", "apply", "-k", leaving)
	n.want("kubectl", "-n", "kube-system", "rollout", "status", "daemonset", "canaryd", rolloutIn)
	n.results.step("removal of all marks", time.Since(started))
	if left := n.traces(); len(left) > 0 {
		n.Errorf("after components/uninstall there are\n%s", strings.Join(left, "\n"))
	}
	n.same("after components/uninstall", before)
	n.want("kubectl", "delete", "-k", leaving)
	n.until("the pod to be gone", func() error {
		out, _, err := n.run("", "kubectl", "-n", "kube-system", "get", "pods", "-o=name")
		if err == nil && out != "" {
			err = errors.New(out)
		}
		return err
	})
	if left := n.traces(); len(left) > 0 {
		n.Errorf("after the removal there are\n%s", strings.Join(left, "\n"))
	}
	n.same("after the removal", before)
	n.wantAnswers()
}

// traces returns the lines about canaryd in the kernel's tables.
func (n *node) traces() []string {
	n.Helper()
	text := n.want("nft", "list", "tables")
	for _, family := range rules.Families() {
		saved, err := n.programs().Save(n.Context(), family)
		n.must(err)
		text += saved
	}
	var all []string
	for line := range strings.Lines(text) {
		if strings.Contains(strings.ToLower(line), "canaryd") {
			all = append(all, strings.TrimSpace(line))
		}
	}
	return all
}
