package e2e

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLockHeld: while somebody holds the xtables lock nothing is written and
// canaryd is not ready; the release is what it waits for.
func TestLockHeld(t *testing.T) {
	on(t, iptables.Legacy, func(n *node) {
		n.load()
		protected := n.protected()
		d := n.start("--lock-wait=500ms")

		// --no-fork: flock becomes sleep and is ended with it.
		holder := exec.CommandContext(n.Context(), "flock", "--no-fork", "/run/xtables.lock", "sleep", "600")
		n.must(holder.Start())
		n.within(startsIn, "flock to hold the lock", func() error {
			fd, err := unix.Open("/run/xtables.lock", unix.O_RDONLY, 0)
			n.must(err)
			defer unix.Close(fd)
			if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err == nil {
				return errors.New("it is free")
			}
			return nil
		})
		n.flushUnlocked()
		n.within(healsIn, "the loss to be noticed", func() error {
			if ready() == nil {
				return errors.New("ready")
			}
			return nil
		})
		flushed := n.protected()
		for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			if ready() == nil {
				n.Fatal("ready while rules are lost and the lock is held")
			}
		}
		n.same("protected rules while the lock is held", flushed, n.protected())
		if slices.Equal(protected, flushed) {
			n.Fatal("nothing was flushed")
		}
		n.want(1, "check")
		d.wantLog("xtables lock", "fuser")

		n.must(holder.Process.Kill())
		_ = holder.Wait() // "killed" is what it says
		took := n.within(healsIn, "health", ready)
		n.Logf("back %s after the release", took.Round(time.Millisecond))
		if took > time.Second {
			n.Errorf("back %s after the release: want right after it", took)
		}
		n.same("protected rules after the release", protected, n.protected())
		if r := n.healed(1); r.Outcome != "proved" {
			n.Errorf("the record ended %s", r.Outcome)
		}
		d.stop()
	})
}

// metrics returns the samples of /metrics: "name{label="value"}" with its
// labels sorted.
func (n *node) metrics() map[string]float64 {
	n.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(n.get("/metrics")))
	n.must(err)
	samples := map[string]float64{}
	for name, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			slices.Sort(labels)
			key := strings.TrimPrefix(name, "canaryd_") + "{" + strings.Join(labels, ",") + "}"
			samples[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return samples
}

// sum adds the samples whose names begin so and hold those words.
func sum(samples map[string]float64, prefix string, words ...string) float64 {
	var total float64
	for name, value := range samples {
		if strings.HasPrefix(name, prefix) && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(name, w) }) {
			total += value
		}
	}
	return total
}

// countExecs puts a script before each program of iptables' that notes that
// it was executed, and returns how often that was. The tests' own programs are
// found before them.
func (n *node) countExecs() (env string, count func() int) {
	n.Helper()
	n.must(os.Mkdir("/run/counted", 0o755))
	for _, base := range []string{"iptables-", "ip6tables-"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			name := base + string(n.programs.With) + suffix
			real, err := exec.LookPath(name)
			n.must(err)
			script := fmt.Sprintf("#!/bin/sh\necho \"$0 $*\" >> /run/execs\nexec %s \"$@\"\n", real)
			n.must(os.WriteFile(filepath.Join("/run/counted", name), []byte(script), 0o755))
		}
	}
	n.must(os.WriteFile("/run/execs", nil, 0o600))
	return "PATH=/run/counted:" + os.Getenv("PATH"), func() int {
		text, err := os.ReadFile("/run/execs")
		n.must(err)
		return bytes.Count(text, []byte("\n"))
	}
}

// TestTenFlushes: what many flushes cost, and whether the numbers agree.
func TestTenFlushes(t *testing.T) {
	const flushes, execsEach = 10, 20
	onBoth(t, func(n *node) {
		n.load()
		protected := n.protected()
		env, execs := n.countExecs()
		n.env = []string{env}
		d := n.start()
		before := n.metrics()
		n.at("execs at the start", execs(), 20)

		start := execs()
		for i := range flushes {
			n.flush()
			n.within(healsIn, fmt.Sprintf("the %d. repair", i+1), func() error {
				if s := n.status(); len(s.Flushes) <= i || !s.Healthy {
					return fmt.Errorf("%d flush records, healthy %t", len(s.Flushes), s.Healthy)
				}
				return nil
			})
			time.Sleep(300 * time.Millisecond) // the looks that follow a replay
			n.within(healsIn, "health", ready)
		}
		n.same("protected rules after ten flushes", protected, n.protected())
		n.at("execs of ten flushes", execs()-start, flushes*execsEach)

		after, status := n.metrics(), n.status()
		records := float64(len(status.Flushes))
		for name, want := range map[string]float64{
			"flush_events_total{": records, "rules_absent_seconds{": records, "loss_since_timestamp_seconds{": 0,
			"canary_present{": 6, "exec_probe_mode{": 0, "hooks_missing{": 0, "restore_failures_total{": 0,
			"last_flush_timestamp_seconds{": float64(status.Flushes[0].Time.UnixMicro()) / 1e6,
		} {
			if got := sum(after, name); got < want-0.001 || got > want+0.001 {
				n.Errorf("%s...} is %f, want %f", name, got, want)
			}
		}
		tables := 0.0
		for _, r := range status.Flushes {
			tables += float64(max(len(r.Families), len(r.Tables)))
		}
		if got := sum(after, "flushes_total{"); got < tables || got > records*6 {
			n.Errorf("flushes_total is %f in all, want %f at least, for %f records", got, tables, records)
		}
		if done := sum(after, "replays_total{", `"proved"`) + sum(after, "replays_total{", `"raced"`); done < flushes {
			n.Errorf("replays_total is %f for proved and raced, want %d at least", done, flushes)
		}
		source := map[iptables.Backend]string{iptables.NFT: `"nft"`, iptables.Legacy: `"lock"`}[n.programs.With]
		if woken := sum(after, "hints_total{", source) - sum(before, "hints_total{", source); woken < flushes {
			n.Errorf("%f hints of source %s for %d flushes: canaryd polls", woken, source, flushes)
		}

		// At rest nothing is executed: no look wakes another.
		time.Sleep(time.Second)
		rest, hints := execs(), sum(n.metrics(), "hints_total{", source)
		time.Sleep(2500 * time.Millisecond)
		if n.at("execs at rest", execs()-rest, 0); sum(n.metrics(), "hints_total{", source) > hints+1 {
			n.Errorf("hints of source %s go on coming at rest", source)
		}

		if n.programs.With == iptables.Legacy {
			flushed := time.Now()
			n.flushUnlocked() // nothing wakes canaryd
			r := n.healed(len(status.Flushes) + 1)
			if noticed := r.Time.Sub(flushed); noticed > 3*time.Second {
				n.Errorf("a flush without the lock was noticed after %s, want the next poll", noticed)
			}
			n.within(healsIn, "the protected rules", func() error {
				if !slices.Equal(protected, n.protected()) {
					return errors.New("they are not back")
				}
				return nil
			})
		}
		d.stop()
	})
}

// at logs a number and fails if it is larger than most.
func (n *node) at(what string, got, most int) {
	n.Helper()
	n.Logf("%s: %d", what, got)
	if got > most {
		n.Errorf("%s: %d, want at most %d", what, got, most)
	}
}

// TestReplacedEndpoint: on legacy the cheap fingerprint does not see an
// endpoint that another one of the same size replaces; the lock's close does.
func TestReplacedEndpoint(t *testing.T) {
	onBoth(t, func(n *node) {
		n.load()
		chain, at, spec := n.endpoint()
		d := n.start()
		before := n.status().Generation
		other := strings.Replace(spec, "--to-destination 10.", "--to-destination 11.", 1)
		if other == spec {
			n.Fatalf("no endpoint to replace in %s", spec)
		}
		n.must(n.programs.RestoreNoflush(n.Context(), rules.IPv4, fmt.Sprintf("*nat\n-R %s %d %s\nCOMMIT\n", chain, at, other)))
		took := n.within(5*time.Second, "the replaced endpoint to be captured", func() error {
			if g := n.status().Generation; g.ID == before.ID || g.Rules != before.Rules {
				return fmt.Errorf("%+v", g)
			}
			return nil
		})
		n.Logf("captured after %s", took.Round(time.Millisecond))
		wanted := n.protected()
		n.flush()
		n.healed(1)
		n.within(healsIn, "the new endpoint", func() error {
			if !slices.Equal(wanted, n.protected()) {
				return errors.New("it is not back")
			}
			return nil
		})
		if _, _, now := n.endpoint(); now != other {
			n.Errorf("the endpoint is %s, want %s", now, other)
		}
		d.stop()
	})
}

// endpoint returns a rule that sends a service to an endpoint.
func (n *node) endpoint() (chain string, at int, spec string) {
	n.Helper()
	for _, c := range n.save()[rules.IPv4][rules.Nat].Chains {
		for i, r := range c.Rules {
			if strings.HasPrefix(c.Name, "KUBE-SEP-") && r.Target == "DNAT" {
				return c.Name, i + 1, r.Spec
			}
		}
	}
	n.Fatal("there is no endpoint")
	return "", 0, ""
}

// TestThousandServices: 13,000 rules that kube-proxy wrote for 1,000 services.
func TestThousandServices(t *testing.T) {
	onBoth(t, func(n *node) {
		nstest.NeedRoot(n.T)
		file, err := os.Open("testdata/services-1000.rules.gz")
		n.must(err)
		defer file.Close()
		unzip, err := gzip.NewReader(file)
		n.must(err)
		text, err := io.ReadAll(unzip)
		n.must(err)
		n.must(n.programs.RestoreNoflush(n.Context(), rules.IPv4, string(text)))
		protected := n.protected()
		d := n.start()
		for i := range 2 {
			n.flush()
			start := time.Now()
			n.within(time.Minute, "the repair", func() error {
				if s := n.status(); len(s.Flushes) <= i || !s.Healthy {
					return fmt.Errorf("%d flush records, healthy %t", len(s.Flushes), s.Healthy)
				}
				return nil
			})
			took := time.Since(start)
			r := n.status().Flushes[0]
			n.Logf("flush %d: %d rules, %d chains lost; noticed after %.3f s, absent for %.3f s, %s; back %s after the flusher's end",
				i+1, r.Lost.Rules, r.Lost.Chains, r.NoticedSeconds, r.AbsentSeconds, r.Outcome, took.Round(time.Millisecond))
			n.same("protected rules", protected, n.protected())
			time.Sleep(time.Second)
			n.within(time.Minute, "health", ready)
		}
		d.stop()
	})
}
