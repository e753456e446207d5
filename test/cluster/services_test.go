//go:build cluster

package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// more is the number of services without clients.
const more = 60

// startServices starts the pods and services, and waits until clients outside have answers.
func startServices(n *node) {
	text, err := os.ReadFile(filepath.Join("testdata", "town.yaml"))
	n.must(err)
	var all strings.Builder
	all.Write(text)
	for i := range more {
		fmt.Fprintf(&all, serviceText, i, 31000+i)
	}
	n.wantInput(all.String(), "kubectl", "apply", "--server-side", "--validate=strict", "-f", "-")
	n.wantAnswers()
	n.wantHealthy()
	n.settled()
	lines, err := n.rules()
	n.must(err)
	s, _, err := n.status()
	n.must(err)
	if s.Generation.Rules < 5*more {
		n.Errorf("canaryd protects %d rules of the %d lines that there are", s.Generation.Rules, len(lines))
	}
	n.results.rules = s.Generation.Rules
}

const serviceText = `---
apiVersion: v1
kind: Service
metadata: {name: more-%d, namespace: town}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  selector: {app: echo}
  ports: [{port: 80, targetPort: 8080, nodePort: %d}]
`

// wantAnswers waits until each target answers a client outside.
func (n *node) wantAnswers() {
	n.Helper()
	n.until("all targets to answer", func() error {
		for _, t := range targets {
			if err := n.client.ask(n.Context(), t); err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
		}
		return nil
	})
}

// settled waits until the rules have not changed for 5 s, and canaryd has learned them.
func (n *node) settled() {
	n.Helper()
	var last string
	var since time.Time
	n.until("the rules to stay as they are", func() error {
		lines, err := n.rules()
		if err != nil {
			return err
		}
		s, healthy, err := n.status()
		if err != nil {
			return err
		}
		if now := strings.Join(lines, "\n"); now != last || !healthy || !s.LearningPendingSince.IsZero() {
			last, since = now, time.Now()
		}
		if rest := time.Since(since); rest < 5*time.Second {
			return fmt.Errorf("they have rested for %s", rest)
		}
		return nil
	})
}
