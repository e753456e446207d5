package e2e

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// verdicts reads what check -o json printed.
func (n *node) verdicts(stdout string) map[string]map[string]string {
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
	onBoth(t, func(n *node) {
		n.load()
		protected := n.protected()
		_, stderr := n.want(2, "check") // nothing was ever stored
		if !strings.Contains(stderr, "nothing to compare with") {
			n.Errorf("check without anything stored says %q", stderr)
		}

		d := n.start("--mode=observe")
		stdout, _ := n.want(0, "check", "-o", "json")
		if v := n.verdicts(stdout)["ipv4"]["nat"]; v != "intact" && v != "changed" {
			n.Errorf("nat is %s, want intact", v)
		}
		d.stop()
		stdout, _ = n.want(0, "check", "-o", "json")
		n.verdicts(stdout)

		n.flush()
		before := n.save()
		stdout, _ = n.want(1, "check", "-o", "json")
		if v := n.verdicts(stdout)["ipv6"]["filter"]; v != "emptied" {
			n.Errorf("without a daemon ipv6 filter is %s, want emptied", v)
		}
		if diff := cmp.Diff(before, n.save(), cmp.AllowUnexported(rules.Table{})); diff != "" {
			n.Errorf("check wrote:\n%s", diff)
		}
		n.want(0, "restore")
		n.want(0, "check")

		d = n.start("--mode=observe")
		n.flush()
		stdout, _ = n.want(1, "check", "-o", "json")
		if v := n.verdicts(stdout)["ipv4"]["nat"]; v != "emptied" {
			n.Errorf("with an observing daemon ipv4 nat is %s, want emptied", v)
		}
		table, _ := n.want(1, "check")
		if lines := strings.Split(strings.TrimSpace(table), "\n"); len(lines) != 7 || !strings.HasPrefix(lines[0], "FAMILY") {
			n.Errorf("check printed %q, want a heading and six rows", table)
		}
		d.stop()
		n.want(1, "check")
		n.want(0, "restore")
		n.want(0, "check")
		n.same("protected rules after restore", protected, n.protected())

		n.must(os.WriteFile("/run/state/state.json", []byte(`{"identity":`), 0o600))
		_, stderr = n.want(2, "check")
		if !strings.Contains(stderr, "corrupt") {
			n.Errorf("check with a broken state file says %q", stderr)
		}
	})
}

func TestRestoreAndRender(t *testing.T) {
	onBoth(t, func(n *node) {
		n.load()
		protected := n.protected()
		_, stderr := n.want(2, "restore")
		if !strings.Contains(stderr, "nothing to replay") {
			n.Errorf("restore without anything stored says %q", stderr)
		}
		live := n.render()

		d := n.start("--mode=observe")
		id := n.status().Generation.ID
		if diff := cmp.Diff(live, n.render()); diff != "" {
			n.Errorf("render with a daemon prints other rules than without one (-without +with):\n%s", diff)
		}
		n.flush()
		n.want(0, "restore")
		n.same("protected rules after restore through the daemon", protected, n.protected())
		n.within(healsIn, "health", ready)

		n.flush()
		n.want(0, "restore", "--generation="+id)
		n.same("protected rules after restore --generation through the daemon", protected, n.protected())
		n.want(2, "restore", "--generation=0123456789ab")
		n.want(2, "restore", "--generation=../../etc/passwd")
		n.want(2, "render", "--ip-family=ipv4", "--generation=0123456789ab")
		d.stop()
		n.want(2, "restore", "--generation=0123456789ab")

		n.flush()
		n.want(0, "restore")
		n.same("protected rules after restore without a daemon", protected, n.protected())
		stored := n.render()
		if diff := cmp.Diff(live, stored); diff != "" {
			n.Errorf("render prints other rules from the state folder than from the kernel (-kernel +folder):\n%s", diff)
		}

		n.must(scenario.Wipe(n.Context(), n.programs, rules.Families()...))
		if left := n.protected(); len(left) != 0 {
			n.Fatalf("the wipe left %q", left)
		}
		for f, text := range stored {
			n.must(n.programs.Restore(n.Context(), f, text))
		}
		n.same("protected rules after loading render's output", protected, n.protected())
		if f := n.foreign(); len(f) != 0 {
			n.Errorf("render's output holds foreign rules: %q", f)
		}
	})
}

// render returns what canaryd render prints for each family.
func (n *node) render() map[rules.Family]string {
	n.Helper()
	texts := map[rules.Family]string{}
	for _, f := range rules.Families() {
		texts[f], _ = n.want(0, "render", "--ip-family="+f.String())
		if !strings.Contains(texts[f], "*nat\n") || strings.Contains(strings.ToLower(texts[f]), "canaryd") {
			n.Errorf("render of %s lacks nat, or holds our marks:\n%s", f, texts[f])
		}
	}
	return texts
}

// TestStatus: TCP shows what the socket shows, without command lines.
func TestStatus(t *testing.T) {
	onBoth(t, func(n *node) {
		n.load()
		d := n.start()
		n.flush()
		n.healed(1)
		time.Sleep(2 * time.Second) // several commands are several records
		n.healed(1)

		private, _ := n.want(0, "status", "-o", "json")
		public := n.get("/api/v1/status")
		var want, got map[string]any
		n.must(json.Unmarshal([]byte(private), &want))
		n.must(json.Unmarshal([]byte(public), &got))
		hidden := 0
		for _, f := range want["flushes"].([]any) {
			record := f.(map[string]any)
			delete(record, "detail")
			writers, _ := record["writers"].([]any)
			for _, w := range append(writers, record["culprit"]) {
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
		page, metrics := n.get("/"), n.get("/metrics")
		for name, text := range map[string]string{"/api/v1/status": public, "/": page, "/metrics": metrics} {
			for _, secret := range []string{"-legacy -w", "-nft -w", "--dport", "--to-destination", "10.88.0.", "-j KUBE"} {
				if strings.Contains(text, secret) {
					n.Errorf("%s shows %q", name, secret)
				}
			}
		}
		table, _ := n.want(0, "status")
		for _, word := range []string{"healthy\n", "mode heal", "backend " + string(n.programs.With), "emptied", "proved"} {
			if !strings.Contains(table, word) {
				n.Errorf("status lacks %q:\n%s", word, table)
			}
		}
		d.stop()
		n.want(2, "status")
	})
}

func TestCleanup(t *testing.T) {
	onBoth(t, func(n *node) {
		n.load()
		protected, foreign := n.protected(), n.foreign()
		noMark := func(when string) {
			n.Helper()
			for _, f := range rules.Families() {
				text, err := n.programs.Save(n.Context(), f)
				n.must(err)
				if strings.Contains(strings.ToLower(text), "canaryd") {
					n.Errorf("%s: iptables-save still shows a mark:\n%s", when, text)
				}
			}
		}

		d := n.start()
		n.want(0, "cleanup")
		noMark("cleanup through the daemon")
		n.same("protected rules after cleanup", protected, n.protected())
		n.same("foreign rules after cleanup", foreign, n.foreign())
		if err := ready(); err == nil {
			n.Error("ready after a cleanup")
		}
		n.get("/healthz") // the loop turns all the same
		n.flush()
		time.Sleep(2500 * time.Millisecond) // more than two polls
		noMark("a flush after a cleanup")
		if slices.Equal(protected, n.protected()) {
			n.Error("canaryd heals after a cleanup")
		}
		n.want(1, "status")
		n.want(2, "restore")
		d.stop()
		noMark("the end of the daemon")

		n.must(scenario.Wipe(n.Context(), n.programs, rules.Families()...))
		n.load()
		d = n.start()
		n.want(0, "cleanup", "--rules")
		noMark("cleanup --rules through the daemon")
		n.same("protected rules after cleanup --rules", nil, n.protected())
		n.same("foreign rules after cleanup --rules", foreign, n.foreign())
		d.stop()

		n.must(scenario.Wipe(n.Context(), n.programs, rules.Families()...))
		n.load()
		n.start().stop()
		n.want(0, "cleanup")
		noMark("cleanup without a daemon")
		n.same("protected rules after cleanup without a daemon", protected, n.protected())
		n.start().stop()
		n.want(0, "cleanup", "--rules")
		noMark("cleanup --rules without a daemon")
		n.same("protected rules after cleanup --rules without a daemon", nil, n.protected())
		n.same("foreign rules after cleanup --rules without a daemon", foreign, n.foreign())
	})
}

// TestObserve: nothing but marks is written, whatever is lost.
func TestObserve(t *testing.T) {
	onBoth(t, func(n *node) {
		n.load()
		n.flush()
		flushed, foreign := n.protected(), n.foreign()
		n.must(scenario.Wipe(n.Context(), n.programs, rules.Families()...))
		n.load()
		protected := n.protected()

		d := n.start("--mode=observe")
		n.flush()
		n.within(healsIn, "a record of the flush", func() error {
			if err := ready(); err == nil {
				return os.ErrNotExist
			}
			if s := n.status(); len(s.Flushes) == 0 || s.Healthy {
				return os.ErrNotExist
			}
			return nil
		})
		time.Sleep(2500 * time.Millisecond) // more than two polls
		n.same("protected rules in observe mode", flushed, n.protected())
		n.same("foreign rules in observe mode", foreign, n.foreign())
		for _, r := range n.status().Flushes {
			if r.Outcome != "skipped" {
				n.Errorf("a flush in observe mode is %s, want skipped", r.Outcome)
			}
		}
		d.wantLog("flushed", "observe mode")
		save, err := n.programs.Save(n.Context(), rules.IPv4)
		n.must(err)
		if !strings.Contains(save, ":KUBE-PROXY-CANARY") {
			n.Error("kube-proxy was nudged in observe mode")
		}
		n.load() // the owners come back
		n.within(healsIn, "health", ready)
		n.same("protected rules after their owners put them back", protected, n.protected())
		d.stop()
	})
}
