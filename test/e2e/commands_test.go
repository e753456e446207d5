package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// verdicts parses the output of check -o json.
func verdicts(n *nodetest.Node, stdout string) map[string]map[string]string {
	n.Helper()
	var answer struct {
		Families map[string]map[string]string `json:"families"`
	}
	if err := json.Unmarshal([]byte(stdout), &answer); err != nil {
		n.Errorf("check -o json printed %q: %v", stdout, err)
	}
	if len(answer.Families) != 2 || len(answer.Families["ipv4"]) != 3 {
		n.Errorf("check -o json printed %q, want two families of three tables", stdout)
	}
	return answer.Families
}

func TestCheck(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		_, stderr := n.Want(2, "check") // nothing is stored yet
		if !strings.Contains(stderr, "nothing to compare with") {
			n.Errorf("check without anything stored says %q", stderr)
		}

		d := n.Start("--mode=observe")
		stdout, _ := n.Want(0, "check", "-o", "json")
		if v := verdicts(n, stdout)["ipv4"]["nat"]; v != "intact" && v != "changed" {
			n.Errorf("nat is %s, want intact", v)
		}
		d.Stop()
		stdout, _ = n.Want(0, "check", "-o", "json")
		verdicts(n, stdout)

		n.Flush()
		before := n.Save()
		stdout, _ = n.Want(1, "check", "-o", "json")
		if v := verdicts(n, stdout)["ipv6"]["filter"]; v != "emptied" {
			n.Errorf("without a daemon ipv6 filter is %s, want emptied", v)
		}
		if diff := cmp.Diff(before, n.Save(), cmp.AllowUnexported(rules.Table{})); diff != "" {
			n.Errorf("check wrote:\n%s", diff)
		}
		n.Want(0, "restore")
		n.Want(0, "check")

		d = n.Start("--mode=observe")
		n.Flush()
		stdout, _ = n.Want(1, "check", "-o", "json")
		if v := verdicts(n, stdout)["ipv4"]["nat"]; v != "emptied" {
			n.Errorf("with an observing daemon ipv4 nat is %s, want emptied", v)
		}
		table, _ := n.Want(1, "check")
		if lines := strings.Split(strings.TrimSpace(table), "\n"); len(lines) != 7 || !strings.HasPrefix(lines[0], "FAMILY") {
			n.Errorf("check printed %q, want a heading and six rows", table)
		}
		d.Stop()
		n.Want(1, "check")
		n.Want(0, "restore")
		n.Want(0, "check")
		n.Same("protected rules after restore", protected, n.Protected())

		n.Must(os.WriteFile("/run/state/state.json", []byte(`{"identity":`), 0o600))
		_, stderr = n.Want(2, "check")
		if !strings.Contains(stderr, "corrupt") {
			n.Errorf("check with a broken state file says %q", stderr)
		}
	})
}

func TestRestoreAndRender(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		_, stderr := n.Want(2, "restore")
		if !strings.Contains(stderr, "nothing to replay") {
			n.Errorf("restore without anything stored says %q", stderr)
		}
		live := render(n)

		d := n.Start("--mode=observe")
		id := n.Status().Generation.ID
		if diff := cmp.Diff(live, render(n)); diff != "" {
			n.Errorf("render with a daemon prints other rules than without one (-without +with):\n%s", diff)
		}
		n.Flush()
		n.Want(0, "restore")
		n.Same("protected rules after restore through the daemon", protected, n.Protected())
		n.Until("health", nodetest.Ready)

		n.Flush()
		n.Want(0, "restore", "--generation="+id)
		n.Same("protected rules after restore --generation through the daemon", protected, n.Protected())
		n.Want(2, "restore", "--generation=0123456789ab")
		n.Want(2, "restore", "--generation=../../etc/passwd")
		n.Want(2, "render", "--ip-family=ipv4", "--generation=0123456789ab")
		d.Stop()
		n.Want(2, "restore", "--generation=0123456789ab")

		n.Flush()
		n.Want(0, "restore")
		n.Same("protected rules after restore without a daemon", protected, n.Protected())
		stored := render(n)
		if diff := cmp.Diff(live, stored); diff != "" {
			n.Errorf("render prints other rules from the state folder than from the kernel (-kernel +folder):\n%s", diff)
		}

		n.Must(scenario.Wipe(n.Context(), n.Programs, rules.Families()...))
		if left := n.Protected(); len(left) != 0 {
			n.Fatalf("the wipe left %q", left)
		}
		for f, text := range stored {
			n.Must(n.Programs.Restore(n.Context(), f, text))
		}
		n.Same("protected rules after loading render's output", protected, n.Protected())
		if f := n.Foreign(); len(f) != 0 {
			n.Errorf("render's output holds foreign rules: %q", f)
		}
	})
}

// render returns canaryd render's output for each family.
func render(n *nodetest.Node) map[rules.Family]string {
	n.Helper()
	texts := map[rules.Family]string{}
	for _, f := range rules.Families() {
		texts[f], _ = n.Want(0, "render", "--ip-family="+f.String())
		if !strings.Contains(texts[f], "*nat\n") || strings.Contains(strings.ToLower(texts[f]), "canaryd") {
			n.Errorf("render of %s lacks nat, or holds our marks:\n%s", f, texts[f])
		}
	}
	return texts
}

// TestStatus: TCP shows the same as the socket, but no command lines.
func TestStatus(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start("--poll-interval=3s") // a look changes both answers
		n.Flush()
		n.Healed(1)

		private, public := "", n.Get("/api/v1/status")
		n.Until("a moment in which nothing changes", func() error {
			before := public
			private, _ = n.Want(0, "status", "-o", "json")
			if public = n.Get("/api/v1/status"); public != before {
				return fmt.Errorf("a look or a save came in between (-before +after):\n%s", cmp.Diff(before, public))
			}
			return nil
		})
		var want, got map[string]any
		n.Must(json.Unmarshal([]byte(private), &want))
		n.Must(json.Unmarshal([]byte(public), &got))
		hidden := 0
		for _, f := range want["flushes"].([]any) {
			record := f.(map[string]any)
			delete(record, "detail")
			writers, _ := record["writers"].([]any)
			culprits, _ := record["culprits"].([]any)
			for _, w := range append(slices.Concat(writers, culprits), record["culprit"]) {
				if w := w.(map[string]any); w["command"] != nil {
					hidden++
					delete(w, "command")
				}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			n.Errorf("/api/v1/status is not status -o json without command lines (-want +got):\n%s", diff)
		}
		if hidden == 0 {
			n.Log("no command line was caught this time")
		}
		page, metrics := n.Get("/"), n.Get("/metrics")
		for name, text := range map[string]string{"/api/v1/status": public, "/": page, "/metrics": metrics} {
			for _, secret := range []string{"-legacy -w", "-nft -w", "--dport", "--to-destination", "10.88.0.", "-j KUBE"} {
				if strings.Contains(text, secret) {
					n.Errorf("%s shows %q", name, secret)
				}
			}
		}
		table, _ := n.Want(0, "status")
		for _, word := range []string{"healthy\n", "mode heal", "backend " + string(n.Programs.With), "emptied", "proved"} {
			if !strings.Contains(table, word) {
				n.Errorf("status lacks %q:\n%s", word, table)
			}
		}
		d.Stop()
		n.Want(2, "status")
	})
}

func TestCleanup(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected, foreign := n.Protected(), n.Foreign()
		noMark := func(when string) {
			n.Helper()
			for _, f := range rules.Families() {
				text, err := n.Programs.Save(n.Context(), f)
				n.Must(err)
				if strings.Contains(strings.ToLower(text), "canaryd") {
					n.Errorf("%s: iptables-save still shows a mark:\n%s", when, text)
				}
			}
		}

		d := n.Start()
		n.Want(0, "cleanup")
		noMark("cleanup through the daemon")
		n.Same("protected rules after cleanup", protected, n.Protected())
		n.Same("foreign rules after cleanup", foreign, n.Foreign())
		if err := nodetest.Ready(); err == nil {
			n.Error("ready after a cleanup")
		}
		n.Get("/healthz") // the loop still turns
		n.Want(1, "status")
		n.Want(2, "restore")
		d.Stop()
		noMark("the end of the daemon")

		n.Must(scenario.Wipe(n.Context(), n.Programs, rules.Families()...))
		n.Load()
		d = n.Start()
		n.Want(2, "cleanup", "--rules") // the command must name an owner
		n.Same("protected rules after a cleanup that was refused", protected, n.Protected())
		n.Want(0, "cleanup", "--rules", "--protect=kube,cni")
		noMark("cleanup --rules through the daemon")
		n.Same("protected rules after cleanup --rules", nil, n.Protected())
		n.Same("foreign rules after cleanup --rules", foreign, n.Foreign())
		d.Stop()

		n.Must(scenario.Wipe(n.Context(), n.Programs, rules.Families()...))
		n.Load()
		n.Start().Stop()
		n.Want(0, "cleanup")
		noMark("cleanup without a daemon")
		n.Same("protected rules after cleanup without a daemon", protected, n.Protected())
		n.Start().Stop()
		n.Want(2, "cleanup", "--rules")
		n.Same("protected rules after a cleanup without a daemon that was refused", protected, n.Protected())
		n.Want(0, "cleanup", "--rules", "--protect=auto")
		noMark("cleanup --rules without a daemon")
		n.Same("protected rules after cleanup --rules without a daemon", nil, n.Protected())
		n.Same("foreign rules after cleanup --rules without a daemon", foreign, n.Foreign())
	})
}
