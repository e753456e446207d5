package faults

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

const stateFile = "/run/state/state.json"

// TestKilled: canaryd is killed at some moment of a replay. The next one restores the missing
// rules, takes none of the killed one's writes for a flush, and leaves no doubled mark. A
// native table is complete or does not exist. internal/daemon tests a kill at each single step,
// on a Fake.
func TestKilled(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		n.LoadNative(100)
		native := func() string { return output(n, "nft", "-s", "list", "table", "ip", "kube-proxy") }
		protected, whole := n.Protected(), native()
		d := n.Start()
		marks := len(n.Marks())
		found := map[string]int{}
		for i, delay := range []time.Duration{0, 35, 65, 100} {
			n.NativeStored()
			both := i%2 == 1 && n.Programs.With == iptables.NFT // iptables' tables and the native one
			if both {
				nft(n, "flush ruleset")
			} else {
				n.Flush()
			}
			left := n.Foreign()
			testkit.Pass(n.T, delay*time.Millisecond, "the moment of the replay at which canaryd is killed")
			d.Kill()
			missing := !slices.Equal(protected, n.Protected())
			if tables := output(n, "nft", "list", "tables"); !both || strings.Contains(tables, "table ip kube-proxy\n") {
				n.Same("the native table of a canaryd that was killed", strings.Split(whole, "\n"), strings.Split(native(), "\n"))
			}
			d = n.Start()
			n.Same("the native table", strings.Split(whole, "\n"), strings.Split(native(), "\n"))
			s := n.Status()
			for _, f := range s.Flushes {
				if f.Kind == "replaced" || f.Outcome != "proved" && f.Outcome != "raced" {
					n.Errorf("killed %s after a flush; the next one reports %+v", delay*time.Millisecond, f)
				}
			}
			most := 1
			if both { // each kind of table may have a record
				most = 2
			}
			if len(s.Flushes) > most || missing && len(s.Flushes) == 0 {
				n.Errorf("killed %s after a flush, with rules missing: %t; the next one reports %d flushes", delay*time.Millisecond, missing, len(s.Flushes))
			}
			n.Same(fmt.Sprintf("protected rules, killed %s after a flush", delay*time.Millisecond), protected, n.Protected())
			n.Same("foreign rules", left, n.Foreign())
			if got := len(n.Marks()); got != marks {
				n.Errorf("killed %s after a flush: %d lines of marks, want %d", delay*time.Millisecond, got, marks)
			}
			found[fmt.Sprintf("missing: %t, reported: %t", missing, len(s.Flushes) > 0)]++
		}
		n.Logf("what the next one found: %v", found)
		d.Stop()
	})
}

// unsummed removes the sum from a state, as older versions wrote it.
func unsummed(s string) string {
	return regexp.MustCompile(`,"sum":"[0-9a-f]*"`).ReplaceAllString(s, "")
}

// TestFlushedWhileDown: rules are lost while no canaryd runs. canaryd restores them from a
// stored state of this boot and namespace that is complete and has a known format. Otherwise it
// logs the reason, writes none of the stored rules, and learns the present ones. pkg/reload
// tests each kind of change to a file.
func TestFlushedWhileDown(t *testing.T) {
	identity := func(field string) func(string) string {
		return func(s string) string {
			return regexp.MustCompile(`("`+field+`":")[^"]*`).ReplaceAllString(unsummed(s), "${1}other")
		}
	}
	generation := func(n *nodetest.Node) string {
		return filepath.Join("/run/state/generations", n.Stored()[0]+".json")
	}
	state := func(*nodetest.Node) string { return stateFile }
	tests := []struct {
		name   string
		file   func(*nodetest.Node) string
		damage func(string) string
		back   bool
		log    []string
	}{
		{"whole", state, func(s string) string { return s }, true, []string{"Took up the stored generation"}},
		{"of another boot", state, identity("bootID"), false, []string{"made elsewhere", `boot \"other\"`}},
		{"of another boot, by one byte", state, func(s string) string { return strings.Replace(s, `"bootID":"`, `"bootID":"x`, 1) }, false, []string{"its sum is another"}},
		{"a state cut off", state, func(s string) string { return s[:len(s)/2] }, false, []string{"state.json is corrupt"}},
		{"a generation cut off", generation, func(s string) string { return s[:len(s)/2] }, false, []string{"json is corrupt"}},
	}
	// A generation of this boot shows the loss, and an operator must decide.
	waiting := []string{"of another boot, by one byte", "a state cut off"}
	// Nothing shows the last rules in force, and the node is not healthy until an operator
	// decides.
	unread := []string{"a generation cut off"}
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		for _, test := range tests {
			n.Must(os.RemoveAll("/run/state"))
			d := n.Start()
			d.Stop()
			path := test.file(n)
			text, err := os.ReadFile(path)
			n.Must(err)
			damaged := test.damage(string(text))
			if damaged == string(text) && test.name != "whole" {
				n.Fatalf("%s: nothing is damaged in %s", test.name, path)
			}
			n.Must(os.WriteFile(path, []byte(damaged), 0o600))
			n.Flush()
			lost := n.Protected()
			d = n.Launch()
			waits, cannotRead := slices.Contains(waiting, test.name), slices.Contains(unread, test.name)
			n.Until("canaryd to be ready, or to ask for a decision", func() error {
				err := nodetest.Ready()
				switch {
				case cannotRead && (err == nil || !strings.Contains(err.Error(), "the stored rules cannot be read") || !strings.Contains(err.Error(), "canaryd dismiss")):
					return fmt.Errorf("readiness: %w", err)
				case cannotRead:
					return nil
				case !waits:
					return err
				case err == nil || !strings.Contains(err.Error(), "canaryd restore --generation"):
					return fmt.Errorf("readiness: %w", err)
				}
				return nil
			})
			d.WantLog(test.log...)
			if cannotRead {
				if code, told, _ := n.Canaryd("check"); code != 2 || !strings.Contains(told, "cannot be read") {
					n.Errorf("%s: check has exit code %d and says:\n%s", test.name, code, told)
				}
				n.Want(0, "dismiss")
				n.Must(nodetest.Ready())
			}
			if test.back {
				n.Same(test.name+": protected rules", protected, n.Protected())
				if got := len(n.Status().Flushes); got != 1 {
					n.Errorf("%s: %d flush records, want 1", test.name, got)
				}
			} else {
				n.Polled(1)
				n.Same(test.name+": what the flush left", lost, n.Protected())
				want := 0
				if waits {
					want = 1
				}
				if got := len(n.Status().Flushes); got != want {
					n.Errorf("%s: %d flush records, want %d", test.name, got, want)
				}
			}
			d.Stop()
			n.Must(scenario.Wipe(n.Context(), n.Programs, rules.Families()...))
			n.Load()
		}
	})
}

// TestUnreadWithoutADaemon: the generation cannot be read, and rules were flushed meanwhile.
// check says so without a daemon too, and a restore without one ends the wait.
func TestUnreadWithoutADaemon(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		older := n.Status().Generation.ID
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 30001 -j RETURN\nCOMMIT\n"))
		newest := ""
		n.Until("the generation on disk", func() error {
			if newest = n.Status().Generation.ID; newest == older || !slices.Contains(n.Stored(), newest) {
				return fmt.Errorf("it is %s, on disk are %q", newest, n.Stored())
			}
			return nil
		})
		d.Stop()
		n.Must(os.Truncate("/run/state/generations/"+newest+".json", 100))
		n.Flush()
		d = n.Launch()
		n.Until("canaryd to ask for a decision", func() error {
			if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "the stored rules cannot be read") {
				return fmt.Errorf("readiness: %w", err)
			}
			if now := n.Status().Generation.ID; now == "" || now == newest || !slices.Contains(n.Stored(), now) {
				return fmt.Errorf("what stands is generation %q, on disk are %q", now, n.Stored())
			}
			return nil
		})
		d.Stop()
		if code, told, _ := n.Canaryd("check"); code != 2 || !strings.Contains(told, "cannot be read") {
			n.Errorf("check without a daemon has exit code %d and says:\n%s", code, told)
		}
		n.Want(0, "restore", "--generation="+older, "--yes")
		n.Want(0, "check")
		n.Start()
	})
}

// TestUnreadNativeWithoutADaemon is TestUnreadWithoutADaemon for a native table. canaryd may
// have started after the flush and waited for a decision, or not started before the restore.
func TestUnreadNativeWithoutADaemon(t *testing.T) {
	for name, starts := range map[string]bool{"canaryd started meanwhile": true, "it did not": false} {
		t.Run(name, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				n.Load()
				n.LoadNative(100)
				d := n.Start()
				present := func() string {
					now := n.Status().Native
					return now[slices.IndexFunc(now, func(t scenario.NativeStatus) bool { return t.Table == "ip kube-proxy" })].Generation
				}
				n.NativeStored()
				older := present()
				whole := output(n, "nft", "-s", "list", "table", "ip", "kube-proxy")
				nft(n, "add chain ip kube-proxy new")
				n.Until("the change to be learned", func() error {
					if present() == older {
						return errors.New("it is not")
					}
					return nil
				})
				n.NativeStored()
				newest := present()
				d.Stop()
				files, err := filepath.Glob("/run/state/*/" + newest + "*")
				if err != nil || len(files) != 1 {
					n.Fatalf("the file of generation %s: %q, %v", newest, files, err)
				}
				n.Must(os.Truncate(files[0], 100))
				nft(n, "delete table ip kube-proxy")
				if starts {
					d = n.Launch()
					n.Until("canaryd to ask for a decision", func() error {
						if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "the stored rules of table ip kube-proxy cannot be read") {
							return fmt.Errorf("readiness: %w", err)
						}
						return nil
					})
					d.Stop()
				}
				n.Want(0, "restore", "--generation="+older, "--yes")
				n.Same("the native table", strings.Split(whole, "\n"), strings.Split(output(n, "nft", "-s", "list", "table", "ip", "kube-proxy"), "\n"))
				n.Want(0, "check")
				n.Start()
			})
		})
	}
}
