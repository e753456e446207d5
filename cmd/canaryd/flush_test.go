package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A historian is a daemon that knows one flush, by number and by ID.
type historian struct {
	control.Controller
	reply api.FlushReply
	err   error // instead of an answer
}

func (h historian) Flush(_ context.Context, r api.FlushRequest) (api.FlushReply, error) {
	if r.Name != "1" && r.Name != h.reply.Flush.ID {
		return api.FlushReply{}, fmt.Errorf("%w: %q; there is 1", api.ErrNoFlush, r.Name)
	}
	return h.reply, h.err
}

// serveControl serves c until the test ends, and returns the socket.
func serveControl(t *testing.T, c control.Controller) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	ctx, cancel := context.WithCancel(context.Background())
	l, err := control.Listen(ctx, socket)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- control.Serve(ctx, l, control.NewHandler(c)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return socket
}

// oneFlush returns all known facts about a flush.
func oneFlush() api.FlushReply {
	at := time.Date(2026, 3, 4, 5, 6, 7, 89_000_000, time.UTC)
	culprit := api.Culprit{Time: at.Add(time.Millisecond), PID: 4711, Comm: "iptables", Command: "iptables -t nat -F", Ancestors: []string{"bash", "cron\x1b"}, Unit: "cron.service"}
	other := api.Culprit{
		Time: at.Add(2 * time.Millisecond), PID: 4712, Comm: "nft", ContainerID: strings.Repeat("0123456789abcdef", 4),
		PodUID: "8d1f0a52-6c3e-4a8b-9d7e-2f1c0b9a8e7d",
	}
	return api.FlushReply{
		Flush: api.Flush{
			ID: "660c8b90ccb7b", Time: at, Kind: canary.TableDeleted, Families: []rules.Family{rules.IPv4}, Tables: []rules.TableName{rules.Nat, rules.Filter},
			Culprit: culprit, Culprits: []api.Culprit{culprit, other}, Writers: []api.Culprit{{Time: at, PID: 4700}, culprit, other},
			Lost: api.Lost{Chains: 14, Rules: 112, Jumps: 3, Unprotected: 3, Tables: []api.TableLoss{
				{
					Family: rules.IPv4, Table: rules.Nat, Kind: canary.TableDeleted, Chains: 13, Rules: 110, Jumps: 2, More: 12, Unprotected: 3, By: []uint32{4711, 4712},
					PerChain: []api.ChainLoss{{Chain: "KUBE-SERVICES", Rules: 40}, {Chain: "PREROUTING", Rules: 2, Jumps: 2}},
				},
				{
					Family: rules.IPv4, Table: rules.Filter, Kind: canary.Emptied, Chains: 1, Rules: 2, Jumps: 1, By: []uint32{4711},
					PerChain: []api.ChainLoss{{Chain: "KUBE-FORWARD", Rules: 1}, {Chain: "FORWARD", Rules: 1, Jumps: 1}},
				},
			}},
			Pods: []api.LostPod{
				{Namespace: "default", Name: "web-0", Container: "5f1e", HostPorts: []string{"8080/tcp"}},
				{Container: "c2d9\x1b[2J", HostPorts: []string{"443/tcp", "443/udp"}, Gone: true},
			},
			MorePods:       1,
			NoticedSeconds: 0.0021, AbsentSeconds: 0.0484, Outcome: reload.Proved, Attempts: 2, Policies: []string{"filter FORWARD: ACCEPT, was DROP"},
		},
		Diff: []api.TableDiff{
			{Family: rules.IPv4, Table: rules.Nat, Lines: []string{
				`--A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`, "-:KUBE-SERVICES - [0:0]",
				`--A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "default/kubernetes:https cluster IP" -j KUBE-SVC-NPX46M4PTMTKRN6Y`,
			}, More: 108},
			{Family: rules.IPv4, Table: rules.Filter, Lines: []string{
				"--A FORWARD -j KUBE-FORWARD", `--A KUBE-FORWARD -m comment --comment "old` + "\x1b[2J\xff" + `" -j ACCEPT`,
				"+-A KUBE-FORWARD -j DROP",
			}},
		},
	}
}

// TestFlush: the output for people and for programs.
func TestFlush(t *testing.T) {
	ago := regexp.MustCompile(`, [0-9hms]+ ago\n`)
	for name, change := range map[string]func(*api.FlushReply){
		"flush": func(*api.FlushReply) {},
		"flush-while-down": func(r *api.FlushReply) {
			r.Flush.LastInForce, r.Flush.AbsentAtMost, r.Flush.AbsentSeconds = r.Flush.Time.Add(-28*time.Second), true, 28.0123
		},
		"flush-nobody": func(r *api.FlushReply) {
			f := &r.Flush
			f.Culprit, f.Culprits, f.Writers, f.Policies, f.Lost.Tables, f.Earlier = api.Culprit{}, nil, nil, nil, nil, true
			f.Lost.Unprotected = 0
			f.Outcome, f.Attempts, f.AbsentSeconds, f.Detail = api.Interrupted, 1, 0, "iptables-nft-restore refused the rules:\nline 7 failed"
			r.Diff, r.NoDiff = nil, "the journal has no such entry: 660c8b90ccb7b"
		},
	} {
		t.Run(name, func(t *testing.T) {
			reply := oneFlush()
			change(&reply)
			socket := serveControl(t, historian{reply: reply})
			code, stdout, stderr := call(t, "status", "--socket="+socket, "--flush=1")
			if code != exitOK || stderr != "" {
				t.Errorf("exit code %d, %q", code, stderr)
			}
			golden(t, name, ago.ReplaceAllString(stdout, ", some time ago\n"))
			if strings.Contains(stdout, "\x1b") {
				t.Error("a rule's comment reaches the terminal as it is")
			}

			code, stdout, stderr = call(t, "status", "--socket="+socket, "--flush", "660c8b90ccb7b", "-o", "json")
			var got api.FlushReply
			if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != exitOK || stderr != "" {
				t.Fatalf("exit code %d, %q, %v", code, stderr, err)
			}
			if len(reply.Diff) > 1 { // JSON cannot hold bytes that are no characters
				line := &reply.Diff[1].Lines[1]
				*line = strings.ToValidUTF8(*line, "\ufffd")
			}
			if diff := cmp.Diff(reply, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestFlushExitCodes: 1 means that there is no such flush, and 2 that it is unknown.
func TestFlushExitCodes(t *testing.T) {
	socket := serveControl(t, historian{reply: oneFlush()})
	broken := serveControl(t, historian{reply: oneFlush(), err: errors.New("the disk is on fire")})
	none := filepath.Join(t.TempDir(), "s")
	for _, test := range []struct {
		socket, name string
		code         int
		stderr       string
	}{
		{socket, "2", exitNo, `canaryd: no such flush: "2"; there is 1`},
		{socket, "660c8b90ccb7c", exitNo, `canaryd: no such flush: "660c8b90ccb7c"; there is 1`},
		{socket, "", exitNo, `canaryd: no such flush: ""; there is 1`},
		{broken, "1", exitError, "canaryd: the disk is on fire"},
		{none, "1", exitError, "canaryd: no canaryd is running: no process listens at " + none},
	} {
		for _, output := range []string{"table", "json"} {
			code, stdout, stderr := call(t, "status", "--socket="+test.socket, "--flush="+test.name, "-o", output)
			if code != test.code || stdout != "" || stderr != test.stderr+"\n" {
				t.Errorf("--flush=%s -o %s: exit code %d, %q, %q; want %d, %q", test.name, output, code, stdout, stderr, test.code, test.stderr)
			}
		}
	}
}

// A guarding is a daemon that guards by the words of --protect.
type guarding struct {
	control.Controller
	protect    string
	generation string // of IPv4, as text; "" is an error
}

func (g guarding) Render(_ context.Context, r api.RenderRequest) (string, error) {
	if g.generation == "" {
		return "", errors.New("no generation")
	}
	return map[rules.Family]string{rules.IPv4: g.generation}[r.Family], nil
}

func (g guarding) Status() api.Status { return api.Status{Protect: g.protect} }
