package daemon

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/cniresults"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The containers of the scenarios' node, for which libcni wrote these files.
const (
	webID     = "5f1e0c6a2b7d4e89a1c3f5d7b9e1a3c5"
	gatewayID = "c2d94b1f8e6a47d0b3a5c7e9f1b3d5a7"
)

// A criRuntime is a container runtime, which runs plugins. libcni keeps a file for each
// container.
type criRuntime struct {
	*rig
	dir   string
	files map[string][]byte // of containers, by ID
}

// startPods is start next to a container runtime whose files canaryd may read.
func startPods(t *testing.T, backend iptables.Backend, s setup) criRuntime {
	t.Helper()
	return startPodsOn(t, loadedFake(t, backend), s)
}

// startPodsOn is startPods on that Fake.
func startPodsOn(t *testing.T, fake *iptablestest.Fake, s setup) criRuntime {
	t.Helper()
	c := criRuntime{dir: t.TempDir(), files: map[string][]byte{}}
	must(t, os.CopyFS(c.dir, os.DirFS("../cniresults/testdata/results")))
	for _, id := range []string{webID, gatewayID} {
		text, err := os.ReadFile(c.file(id))
		must(t, err)
		c.files[id] = text
	}
	s.attachments = cniresults.New(c.dir)
	c.rig = startOn(t, fake, s)
	c.after(20 * time.Second)
	return c
}

func (c criRuntime) file(id string) string { return filepath.Join(c.dir, "cbr0-"+id+"-eth0") }

// forget removes a container's file, as libcni does after a DEL.
func (c criRuntime) forget(id string) {
	c.t.Helper()
	must(c.t, os.Remove(c.file(id)))
}

// del removes a container's rules as the plugins do at DEL. Missing rules are no error to them.
// libcni removes its file afterwards.
func (c criRuntime) del(id string) {
	c.t.Helper()
	for _, f := range rules.Families() {
		set := c.tables()[f][rules.Nat]
		var chains []string
		if set != nil {
			for _, chain := range set.Chains {
				for _, r := range chain.Rules {
					if strings.Contains(r.Spec, id) && !slices.Contains(chains, chain.Name) && strings.HasPrefix(r.Target, "CNI-") {
						must(c.t, c.fake.RestoreNoflush(f, section(rules.Nat, "-D "+chain.Name+" "+r.Spec)))
						if !slices.Contains(chains, r.Target) {
							chains = append(chains, r.Target)
						}
					}
				}
			}
		}
		for _, name := range chains {
			must(c.t, c.fake.RestoreNoflush(f, section(rules.Nat, "-F "+name, "-X "+name)))
		}
	}
}

// standsOf returns the lines of iptables-save for a container: its chains, and the rules that
// name it.
func (c criRuntime) standsOf(id string) []string {
	c.t.Helper()
	chains := map[string][]string{
		webID:     {"46d5e6e569f30aa7e18e0"},
		gatewayID: {"31c7af326e67a1a733e30"},
	}[id]
	var found []string
	for _, f := range rules.Families() {
		for line := range strings.Lines(c.fake.Save(f)) {
			if strings.Contains(line, id) || slices.ContainsFunc(chains, func(hash string) bool { return strings.Contains(line, hash) }) {
				found = append(found, strings.TrimSpace(line))
			}
		}
	}
	return found
}

// line returns the first line of iptables-save with that beginning and that text.
func (c criRuntime) line(f rules.Family, begins, contains string) string {
	c.t.Helper()
	for line := range strings.Lines(c.fake.SaveTable(f, rules.Nat)) {
		if strings.HasPrefix(line, begins) && strings.Contains(line, contains) {
			return strings.TrimSpace(line)
		}
	}
	c.t.Fatalf("no line %s ... %s", begins, contains)
	return ""
}

func (c criRuntime) wantPod(when, id string, there bool) {
	c.t.Helper()
	if got := c.standsOf(id); (len(got) > 0) != there {
		c.t.Errorf("%s: of %s stand %d lines, want some: %t\n%s", when, id, len(got), there, strings.Join(got, "\n"))
	}
}

// TestAPodRemovedDuringTheOutage: a flush takes everything, chains too. A DEL then finds no
// rule, and the pod's file is removed. canaryd restores all rules but the pod's, and the record
// names the pods whose host ports were lost.
func TestAPodRemovedDuringTheOutage(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		want := c.standsOf(webID)
		must(t, c.d.pauseFor(t, time.Minute))
		c.flushAll()
		c.after(2 * time.Second)
		c.del(gatewayID)
		c.forget(gatewayID)
		c.after(2 * time.Second)
		_, err := c.d.Resume(t.Context())
		must(t, err)
		c.settled()
		c.wantReady()
		c.wantPod("after the replay", gatewayID, false)
		if d := cmp.Diff(want, c.standsOf(webID)); d != "" {
			t.Errorf("of the pod that stays (-want +got):\n%s", d)
		}
		pods := []api.LostPod{
			{Namespace: "default", Name: "gateway-x7k2p", Container: gatewayID, HostPorts: []string{"443/tcp", "8443/tcp", "443/udp"}, Gone: true},
			{Namespace: "default", Name: "web-0", Container: webID, HostPorts: []string{"8080/tcp"}},
		}
		if d := cmp.Diff(pods, c.oneRecord().Pods); d != "" {
			t.Errorf("the record's pods (-want +got):\n%s", d)
		}
		c.wantLog("default/web-0 (8080/tcp)")
		c.after(time.Minute)
		c.flushAll()
		c.settled()
		c.wantPod("after another flush", gatewayID, false)
		c.wantPod("after another flush", webID, true)
	})
}

// TestAPodRemovedRightBeforeAFlush: a removal counts after 2 s, or at once if the pod's file is
// gone too.
func TestAPodRemovedRightBeforeAFlush(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		for _, f := range rules.Families() { // a pod without ipMasq has only portmap's jump and chain
			must(t, c.fake.RestoreNoflush(f, section(rules.Nat, "-D "+strings.TrimPrefix(c.line(f, "-A POSTROUTING", gatewayID), "-A "),
				"-F CNI-31c7af326e67a1a733e30223", "-X CNI-31c7af326e67a1a733e30223")))
		}
		c.after(20 * time.Second)
		c.del(gatewayID)
		c.forget(gatewayID)
		c.after(200 * time.Millisecond)
		c.flushAll()
		c.settled()
		c.wantReady()
		c.wantPod("after the flush", gatewayID, false)
		c.wantPod("after the flush", webID, true)
	})
}

// TestAPodWhoseRulesCameBack: a DEL runs between flush and replay, and the runtime removes the
// file only after the replay. canaryd removes the restored rules of the pod, and nothing else.
func TestAPodWhoseRulesCameBack(t *testing.T) {
	for name, gap := range map[string]time.Duration{"right behind the replay": 200 * time.Millisecond, "minutes later": 5 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				c := startPods(t, backend, setup{})
				c.flushAll()
				c.after(gap)
				before := c.tables()
				c.wantPod("after the replay", gatewayID, true)
				c.forget(gatewayID)
				c.after(3 * time.Second)
				c.wantReady()
				c.wantPod("once its file is gone", gatewayID, false)
				c.wantPod("once its file is gone", webID, true)
				c.wantLog("A replay wrote rules of pods that are gone; they are removed")
				c.oneRecord()
				for _, line := range strings.Split(cmp.Diff(strings.Split(without(before), "\n"), strings.Split(without(c.tables()), "\n")), "\n") {
					if strings.HasPrefix(line, "+") {
						t.Errorf("new behind it: %s", line)
					}
				}
				c.wantNothingPending()
				c.flushAll()
				c.settled()
				c.wantPod("after another flush", gatewayID, false)
			})
		})
	}
}

// TestAPodThatHasNoFileYet: libcni writes the file after the plugins' ADD. A pod without a file
// so far is not gone.
func TestAPodThatHasNoFileYet(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		for _, f := range rules.Families() {
			must(t, c.fake.RestoreNoflush(f, section(rules.Nat, ":CNI-DN-0123456789abcdef01234 - [0:0]",
				`-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"cbr0\" id: \"added\"" -m multiport --destination-ports 9090 -j CNI-DN-0123456789abcdef01234`,
				"-A CNI-DN-0123456789abcdef01234 -p tcp -m tcp --dport 9090 -j RETURN")))
		}
		c.after(300 * time.Millisecond)
		c.flushAll()
		c.settled()
		c.wantReady()
		if rs := c.chain(rules.IPv4, rules.Nat, "CNI-DN-0123456789abcdef01234"); len(rs) != 1 {
			t.Errorf("the chain of a pod that is being added holds %q", rs)
		}
	})
}

// TestFilesThatSayNothing: damage to the folder next to a DEL proves nothing about pods, and
// canaryd works as without a folder.
func TestFilesThatSayNothing(t *testing.T) {
	for name, harm := range map[string]func(criRuntime){
		"torn": func(c criRuntime) { must(c.t, os.Truncate(c.file(gatewayID), 100)) },
		"emptied": func(c criRuntime) {
			c.forget(gatewayID)
			c.forget(webID)
		},
		"removed with its folder": func(c criRuntime) { must(c.t, os.RemoveAll(c.dir)) },
		"another folder in its place": func(c criRuntime) {
			must(c.t, os.Rename(c.dir, c.dir+"-old"))
			must(c.t, os.Mkdir(c.dir, 0o700))
		},
		// The pod's rules are unchanged, so that was no DEL.
		"removed by hand": func(c criRuntime) { c.forget(gatewayID) },
	} {
		t.Run(name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				c := startPods(t, backend, setup{})
				before := c.tables()
				harm(c)
				c.after(2 * time.Second)
				if d := cmp.Diff(without(before), without(c.tables())); d != "" {
					t.Errorf("rules were touched (-before +after):\n%s", d)
				}
				c.flushAll()
				c.settled()
				c.wantReady()
				c.wantPod("after the flush", gatewayID, true)
				c.wantPod("after the flush", webID, true)
			})
		})
	}
}

// TestAPodRemovedWhileCanarydWasDown: the next run knows which pods had a file in the last run.
func TestAPodRemovedWhileCanarydWasDown(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		c := startPods(t, backend, setup{store: openStore(t, dir, identity(backend))})
		c.after(time.Minute)
		c.stop()
		c.flushAll()
		c.del(gatewayID)
		c.forget(gatewayID)
		time.Sleep(time.Minute)
		c.rig = run(t, c.fake, setup{store: openStore(t, dir, identity(backend)), attachments: cniresults.New(c.dir)})
		c.settled()
		c.wantReady()
		c.wantPod("after the next start", gatewayID, false)
		c.wantPod("after the next start", webID, true)
		if r := c.oneRecord(); r.Outcome != reload.Proved || len(r.Pods) != 2 || !r.Pods[0].Gone {
			t.Errorf("the record is %+v", r)
		}
	})
}

// TestAPodIsRemovedAndAddedAgain: a container with the same ID is added again. Once canaryd has
// forgotten its rules, it counts as new until its file exists.
func TestAPodIsRemovedAndAddedAgain(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		saved := map[rules.Family][]string{}
		for _, f := range rules.Families() {
			for line := range strings.Lines(c.fake.SaveTable(f, rules.Nat)) {
				line = strings.TrimSpace(line)
				if strings.Contains(line, gatewayID) || strings.Contains(line, "31c7af326e67a1a733e30") {
					saved[f] = append(saved[f], line)
				}
			}
		}
		c.del(gatewayID)
		c.forget(gatewayID)
		c.after(10 * time.Second)
		for _, f := range rules.Families() {
			must(t, c.fake.RestoreNoflush(f, section(rules.Nat, saved[f]...)))
		}
		c.after(500 * time.Millisecond)
		c.flushAll()
		c.settled()
		c.wantPod("before its file is there", gatewayID, true)
		must(t, os.WriteFile(c.file(gatewayID), c.files[gatewayID], 0o600))
		c.after(2 * time.Second)
		c.flushAll()
		c.settled()
		c.wantReady()
		c.wantPod("in the end", gatewayID, true)
	})
}

// pauseFor pauses the daemon.
func (d *Daemon) pauseFor(t *testing.T, length time.Duration) error {
	t.Helper()
	_, err := d.Pause(t.Context(), api.PauseRequest{Seconds: length.Seconds()})
	return err
}

// A folderThen is a folder that changes right after the read for a replay.
type folderThen struct {
	pods.Attachments
	then func()
}

func (f *folderThen) Read() (cniresults.Reading, error) {
	r, err := f.Attachments.Read()
	if then := f.then; then != nil {
		f.then = nil
		then()
	}
	return r, err
}

// TestAFileThatGoesBetweenReadingAndWriting: a pod's file is removed between canaryd's read and
// its replay. The replay still has the pod's rules, and canaryd removes them afterwards.
func TestAFileThatGoesBetweenReadingAndWriting(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		folder := &folderThen{Attachments: c.d.cfg.Attachments}
		must(t, c.d.ask(t.Context(), func(_ context.Context, st *state) {
			c.d.cfg.Attachments = folder
			folder.then = func() { c.forget(gatewayID) }
			c.flushAll()
			st.pods.ReadAt = time.Now() // so that the replay makes the next read
		}))
		c.after(900 * time.Millisecond)
		if folder.then != nil {
			t.Fatal("the replay did not read the folder")
		}
		c.wantPod("behind the replay", gatewayID, true)
		c.after(2 * time.Second)
		c.wantReady()
		c.wantPod("later", gatewayID, false)
		c.wantPod("later", webID, true)
	})
}

// TestRulesThatCannotBeTakenAwayYet: the restore that removes a pod's rules is refused, and
// tried again.
func TestRulesThatCannotBeTakenAwayYet(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		c.flushAll()
		c.after(5 * time.Second)
		release := c.fake.HoldLock()
		c.forget(gatewayID)
		c.after(3 * time.Second)
		if backend == iptables.Legacy {
			c.wantPod("while the lock is held", gatewayID, true)
			c.wantLog("A replay brought back rules of removed pods; canaryd could not delete these rules, and tries again")
		}
		release()
		c.after(20 * time.Second)
		c.wantReady()
		c.wantPod("in the end", gatewayID, false)
		c.wantPod("in the end", webID, true)
	})
}
