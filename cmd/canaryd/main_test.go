package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

var update = flag.Bool("update", false, "write testdata/*.golden anew")

// golden compares got with testdata/name.golden.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; go test ./cmd/canaryd -update writes it anew):\n%s", path, diff)
	}
}

// call runs one command line that ends without a signal.
func call(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return callWithin(t.Context(), args...)
}

func callWithin(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(ctx, args, streams{out: &out, err: &err})
	return code, out.String(), err.String()
}

func TestHelp(t *testing.T) {
	for _, c := range commands() {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := call(t, c.name, "--help")
			if code != exitOK || stderr != "" {
				t.Errorf("exit code %d and %q, want 0 and nothing on stderr", code, stderr)
			}
			golden(t, "help-"+c.name, stdout)
			// It fits a terminal: 24 lines, and 40 for run, which also lists the commands, and
			// for render, which lists the generator's flags.
			most := 24
			if c.name == "run" || c.name == "render" {
				most = 40
			}
			lines := strings.Split(strings.TrimRight(stdout, "\n"), "\n")
			if len(lines) > most {
				t.Errorf("%d lines, want at most %d", len(lines), most)
			}
			for _, line := range lines {
				if len(line) > helpWidth {
					t.Errorf("%d columns, want at most %d: %s", len(line), helpWidth, line)
				}
				if strings.TrimRight(line, " ") != line {
					t.Errorf("%q ends in blanks", line)
				}
			}
		})
	}
}

func TestHelpWithoutCommand(t *testing.T) {
	_, want, _ := call(t, "run", "--help")
	for _, args := range [][]string{{"--help"}, {"-h"}, {"help"}} {
		if code, got, _ := call(t, args...); code != exitOK || got != want {
			t.Errorf("canaryd %s: exit code %d, or another help than that of run", args, code)
		}
	}
}

// TestBadCommandLines: the error is one line that names the mistake and the expected input.
func TestBadCommandLines(t *testing.T) {
	presets := strings.Join(protect.PresetNames(), ", ")
	for _, test := range []struct{ args, want string }{
		{"--mode=x", `--mode is "x": want heal or observe`},
		{"--backend=x", `--backend is "x": want auto or nft or legacy`},
		{"--ip-family=x", `--ip-family is "x": want auto or ipv4 or ipv6 or dual`},
		{"--replay=raw", `--replay is "raw": want auto or text or direct`},
		{"--source=file", `--source is "file": want snapshot or manifest`},
		{"--source=manifest", `--source=manifest needs --manifest, a YAML file or a folder of them`},
		{"--manifest=x.yaml", `--manifest is of use with --source=manifest only`},
		{"--source=", `--source is empty: want snapshot or manifest`},
		{"--random-fully=maybe", `--random-fully is "maybe": want auto or true or false`},
		{"--detect-local-mode=Guess", `--detect-local-mode is "Guess": want ClusterCIDR or NodeCIDR or BridgeInterface or InterfaceNamePrefix`},
		{"--poll-interval=0", `--poll-interval is 0s: want at least 10ms`},
		{"--poll-interval=-1s", `--poll-interval is -1s: want at least 10ms`},
		{"--drill-every=10s", `--drill-every is 10s: want at least 1m0s`},
		{"--poll-interval=soon", `invalid argument "soon" for "--poll-interval" flag: time: invalid duration "soon" (see canaryd run --help)`},
		{"--settle=-1ms", `--settle is -1ms: want at least 0s`},
		{"--settle=10h", `--settle is 10h0m0s: want at most 30s`},
		{"--settle=30001ms", `--settle is 30.001s: want at most 30s`},
		{"--jump-grace=-1ms", `--jump-grace is -1ms: want at least 0s`},
		{"--lock-wait=0", `--lock-wait is 0s: want at least 1ms`},
		{"--max-stored-age=-1h", `--max-stored-age is -1h0m0s: want at least 0s`},
		{"pause --for=0", `--for is 0s: want at least 1s and at most 24h0m0s`},
		{"pause --for=-5m", `--for is -5m0s: want at least 1s and at most 24h0m0s`},
		{"pause --for=1000h", `--for is 1000h0m0s: want at least 1s and at most 24h0m0s`},
		{"pause --for=300y", `invalid argument "300y" for "--for" flag: time: unknown unit "y" in duration "300y" (see canaryd pause --help)`},
		{"pause --why=" + strings.Repeat("x", 201), `--why has 201 characters: want at most 200`},
		{"pause 10m", `"10m" is one word too many (see canaryd pause --help)`},
		{"resume --for=1m", `unknown flag: --for (see canaryd resume --help)`},
		{"--canary-chain=KUBE-CANARYD-CANARY-TOO-LONG-", `--canary-chain: "KUBE-CANARYD-CANARY-TOO-LONG-" is longer than 28 characters`},
		{"--canary-chain=", `--canary-chain: "" is not a chain name`},
		{"--canary-chain=INPUT", `--canary-chain: "INPUT" is a built-in chain`},
		{"--canary-chain=KUBE-SERVICES", `--canary-chain: KUBE-SERVICES is a chain that --protect names`},
		{"--protect=typo", `--protect: "typo" is no preset (` + presets + `); a chain of just that name is protected by the glob '[t]ypo'`},
		{"--protect=[", `--protect: "[" is not a glob of chain names: syntax error in pattern`},
		{"--protect=", `--protect is empty: want auto, presets (` + presets + `) or globs of chain names`},
		{"--metrics-bind-address=nonsense", `--metrics-bind-address is "nonsense": want HOST:PORT, or nothing to turn it off`},
		{"--metrics-host=node-1:9475", `--metrics-host: "node-1:9475" is no name of a host: want one without a port, or an address`},
		{"--mode=x --backend=y", `--mode is "x": want heal or observe; --backend is "y": want auto or nft or legacy`},
		{"--nosuch", `unknown flag: --nosuch (see canaryd run --help)`},
		{"--mode", `flag needs an argument: --mode (see canaryd run --help)`},
		{"status --mode=heal", `unknown flag: --mode (see canaryd status --help)`},
		{"check -o xml", `--output is "xml": want table or json or line`},
		{"status -o line", `--output is "line": want table or json`},
		{"status -o xml", `--output is "xml": want table or json`},
		{"cleanup --rules=perhaps", `invalid argument "perhaps" for "--rules" flag: strconv.ParseBool: parsing "perhaps": invalid syntax (see canaryd cleanup --help)`},
		{"nosuch", `there is no command "nosuch" (see canaryd --help)`},
		{"check twice", `"twice" is one word too many (see canaryd check --help)`},
		{"run check", `"check" is one word too many (see canaryd run --help)`},
		{"--mode=observe check", `"check" is one word too many (see canaryd run --help)`},
	} {
		t.Run(test.args, func(t *testing.T) {
			// A line that is accepted by mistake ends at once, because no test may guard the
			// machine's own tables.
			ended, end := context.WithCancel(t.Context())
			end()
			code, stdout, stderr := callWithin(ended, strings.Fields(test.args)...)
			if code != exitError || stdout != "" {
				t.Errorf("exit code %d and %q, want 2 and nothing on stdout", code, stdout)
			}
			if want := "canaryd: " + test.want + "\n"; stderr != want {
				t.Errorf("got  %swant %s", stderr, want)
			}
		})
	}
}

// TestNoDaemon: a command that needs a daemon says so.
func TestNoDaemon(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	for _, command := range []string{"status", "pause", "resume", "dismiss"} {
		code, stdout, stderr := call(t, command, "--socket="+socket)
		if want := "canaryd: no canaryd is running: no process listens at " + socket + "\n"; code != exitError || stdout != "" || stderr != want {
			t.Errorf("%s: exit code %d, %q, %q; want 2 and %q", command, code, stdout, stderr, want)
		}
	}
}

func verdicts(mangle, nat, filter canary.Verdict) api.Verdicts {
	return api.Verdicts{rules.Mangle: mangle, rules.Nat: nat, rules.Filter: filter}
}

// status returns a Status whose table is always the same: its times are round durations ago.
func status() api.Status {
	ago := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	return api.Status{
		Mode:    api.Heal,
		Backend: api.Backend{Name: iptables.NFT, Version: "1.8.9", Reason: "kubelet's hint chain is in nft only"},
		Families: map[rules.Family]api.Verdicts{
			rules.IPv4: verdicts(canary.Intact, canary.Emptied, canary.Changed),
		},
		DisabledFamilies: map[rules.Family]string{rules.IPv6: "the kernel has no IPv6"},
		Keeper:           map[rules.Family]api.FamilyKeeper{rules.IPv4: {State: api.KeeperKept}},
		Generation:       api.Generation{ID: "0123456789ab", Source: "snapshot", Captured: ago(3 * time.Hour), Rules: 112, Chains: 31},
		Flushes: []api.Flush{
			{
				Time: ago(90 * time.Minute), Kind: canary.Emptied, Families: []rules.Family{rules.IPv4}, Tables: []rules.TableName{rules.Nat},
				Culprit:        api.Culprit{PID: 4711, Comm: "iptables", Command: "iptables -t nat -F"},
				Lost:           api.Lost{Chains: 31, Rules: 112, Jumps: 3},
				NoticedSeconds: 0.0021, AbsentSeconds: 0.0484, Outcome: reload.Proved,
			},
			{
				Time: ago(26 * time.Hour), Kind: canary.TableDeleted, Families: rules.Families(), Tables: protect.Always(),
				Lost: api.Lost{Chains: 60, Rules: 240, Jumps: 9}, Outcome: api.Pending,
			},
		},
	}
}

func number(n int) *int { return &n }

func TestStatusTable(t *testing.T) {
	for name, change := range map[string]func(*api.Status){
		"status": func(*api.Status) {},
		"status-mismatch": func(s *api.Status) {
			s.Backend.Reason, s.Backend.Mixed, s.Backend.Mismatch = "legacy holds more rules: legacy 412, nft 7", true, true
		},
		"status-paused": func(s *api.Status) {
			s.Stored = []api.StoredGeneration{
				{ID: "0123456789ab", Saved: time.Now()},
				{ID: "ba9876543210", Saved: time.Now().Add(-2 * time.Hour), Made: reload.MadeByOwners, Rules: number(110), Chains: number(30)},
				{ID: "ffffffffffff", Saved: time.Now().Add(-72 * time.Hour)},
				{ID: "00000000000e", Saved: time.Now().Add(-time.Hour), Made: reload.MadeAtStart, Rules: number(0), Chains: number(0), NearlyEmpty: true},
				{ID: "00000000000f", Saved: time.Now().Add(-99 * time.Hour), Made: reload.MadeRestored, Rules: number(7), Chains: number(1), Foreign: `the stored generation was made elsewhere: boot "a", here "b"`},
			}
			s.JournalError = "writing the journal: write /var/lib/canaryd/journal.jsonl: no space left on device"
			s.StateError, s.StateSaved, s.StateBehind = "saving the state: write /var/lib/canaryd: no space left on device", time.Now().Add(-2*time.Hour), 3
			s.Paused, s.PausedUntil, s.Contended = true, time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), true
			s.PausedBy, s.PausedSince, s.PausedWhy = "ada", time.Date(2026, 3, 4, 4, 36, 7, 0, time.UTC), "a new firewall\x1b[2J is tested"
		},
		"status-quarantine": func(s *api.Status) {
			s.Families[rules.IPv4] = verdicts(canary.Intact, canary.Intact, canary.Partial)
			s.Quarantined = []api.Quarantined{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD", Rule: "-m set --match-set friends src -j ACCEPT", Reason: "ipset friends is missing, and its members are unknown"}}
			for range 2 {
				s.Quarantined = append(s.Quarantined, api.Quarantined{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD", Rule: "-j DROP", Waits: true,
					Reason: `waits behind "-m set --match-set friends src -j ACCEPT" of KUBE-FORWARD, which cannot be put back`})
			}
			s.WaitingChains = api.WaitingChains(s.Quarantined)
		},
		"status-opaque": func(s *api.Status) {
			s.Families[rules.IPv4] = verdicts(canary.Intact, canary.Intact, canary.Intact)
			for range 3 {
				s.Opaque = append(s.Opaque, api.Quarantined{Family: rules.IPv4, Table: rules.Nat, Chain: "POSTROUTING", Rule: "# rule 0123456789abcdef", Reason: "its text has a line break"})
			}
		},
		"status-left-out": func(s *api.Status) {
			s.Families = map[rules.Family]api.Verdicts{rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Intact)}
			s.LeftOut = []api.LeftOut{{Family: rules.IPv4, Table: rules.Nat, Chain: "KUBE-SVC-AAAAAAAAAAAAAAAA", Rules: 240000}, {Family: rules.IPv4, Table: rules.Filter, Chain: "OUTPUT", Rules: 120000}}
			s.NativeLeftOut = []api.NativeLeftOut{{Family: "inet", Table: "inet blocklist", Rules: 100001}}
		},
		"status-left-out-lost": func(s *api.Status) {
			s.Families = map[rules.Family]api.Verdicts{rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Intact)}
			s.Native = []api.NativeTable{{Family: "inet", Table: "inet blocklist", Verdict: "table_deleted", Why: "the ruleset was flushed", Awaiting: true, LeftOut: true}}
		},
		"status-ownerless": func(s *api.Status) {
			s.Families = map[rules.Family]api.Verdicts{rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Intact)}
			s.RulesWithoutOwner = &api.OwnerlessRules{Since: time.Now().Add(-3 * time.Minute), Families: []rules.Family{rules.IPv4}, Choices: []api.Choice{
				{If: "kube-proxy belongs on this node", Command: "kubectl ..."}, {If: "kube-proxy has left this node", Command: "canaryd cleanup ..."}}}
		},
		"status-refused": func(s *api.Status) {
			s.Families[rules.IPv4] = verdicts(canary.Intact, canary.Intact, canary.Refused)
			s.DeclaredRefused = []api.Refused{
				{Family: rules.IPv4, Table: rules.Filter, Chain: "SITE-IN", Where: "/etc/canaryd/rules/10.v4:5", Rule: "-p tcp -j NOSUCH", Class: iptables.ReasonMissingChain,
					Meaning: "it jumps to a chain or target that does not exist", Reason: "iptables-nft-restore refused the rules (missing_chain, exit 2): Couldn't load target `NOSUCH'"},
			}
			s.SourceErrors = []api.SourceError{
				{Source: "manifest", Where: "/etc/canaryd/cluster.yaml:7", Reason: "/etc/canaryd/cluster.yaml:7: mapping values are not allowed in this context",
					Since: time.Now().Add(-time.Hour), InForce: api.StoredGood},
			}
		},
		"status-nothing": func(s *api.Status) {
			s.Families[rules.IPv4] = verdicts(canary.Intact, canary.Intact, canary.Intact)
			s.NothingProtected = &api.Nothing{Kubelet: true, NativeTables: []string{"ip kube-proxy", "ip6 kube-proxy"}, Rules: 12, Chains: []string{"CILIUM_INPUT"}}
			s.Flushes = nil
		},
		"status-no-flush": func(s *api.Status) {
			s.Flushes, s.Keeper[rules.IPv6] = nil, api.FamilyKeeper{State: api.KeeperIdle}
		},
		"status-being-read": func(s *api.Status) {
			s.Flushes, s.LossSince = nil, time.Now().Add(-2*time.Second)
		},
		"status-standby": func(s *api.Status) {
			s.Flushes[0].Standby = &api.StandbyUse{Families: []rules.Family{rules.IPv4}, AfterSeconds: 0.003, OpenSeconds: 0.0454}
			s.Standby = map[rules.Family]api.FamilyStandby{
				rules.IPv4: {State: api.StandbyBehind, Chains: 3318, Uncopied: 2, Outstanding: 1},
				rules.IPv6: {State: api.StandbyUnavailable, Reason: "another process has a table of the standby's name\x1b[31m"},
			}
			s.Native = []api.NativeTable{{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact, Chains: 141, Rules: 189, Elements: 237, Witness: "canaryd-witness",
				Standby: &api.FamilyStandby{State: api.StandbyArmed, Chains: 134}}}
		},
		"status-no-keeper": func(s *api.Status) {
			s.Keeper[rules.IPv4] = api.FamilyKeeper{State: api.KeeperUnavailable, Reason: "another process has a table named canaryd-keeper"}
		},
		"status-both-fine": func(s *api.Status) {
			s.Families = map[rules.Family]api.Verdicts{}
			for _, f := range rules.Families() {
				s.Families[f] = verdicts(canary.Intact, canary.Intact, canary.Intact)
			}
			s.DisabledFamilies, s.Flushes, s.Generation.Captured, s.Mode = nil, nil, time.Time{}, api.Observe
		},
		"status-many-flushes": func(s *api.Status) {
			for range 20 {
				s.Flushes = append(s.Flushes, s.Flushes[0])
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := status()
			change(&s)
			var out bytes.Buffer
			if err := printStatus(&out, "table", s); err != nil {
				t.Fatal(err)
			}
			golden(t, name, out.String())
		})
	}
}

func TestCheckTable(t *testing.T) {
	for _, test := range []struct {
		name     string
		families map[rules.Family]api.Verdicts
		missing  []api.Quarantined
		opaque   []api.Quarantined
		code     int
	}{
		{"intact", map[rules.Family]api.Verdicts{
			rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Changed), rules.IPv6: verdicts(canary.Intact, canary.Intact, canary.Intact),
		}, nil, nil, exitOK},
		{"partial", map[rules.Family]api.Verdicts{rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Partial)},
			[]api.Quarantined{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD"}}, nil, exitNo},
		{"warning", map[rules.Family]api.Verdicts{rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Intact)},
			nil, []api.Quarantined{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD"}}, exitOK},
		{"loss", map[rules.Family]api.Verdicts{
			rules.IPv4: verdicts(canary.Unknown, canary.Intact, canary.Intact), rules.IPv6: verdicts(canary.Intact, canary.ChainDeleted, canary.Intact),
		}, nil, nil, exitNo},
		{"unknown", map[rules.Family]api.Verdicts{rules.IPv4: verdicts(canary.Intact, canary.Unknown, canary.Intact)}, nil, nil, exitError},
	} {
		for _, output := range []string{"table", "json", "line"} {
			t.Run(test.name+" "+output, func(t *testing.T) {
				var out bytes.Buffer
				code, err := report(&options{output: output}, streams{out: &out}, api.Status{Families: test.families, Quarantined: test.missing, Opaque: test.opaque})
				if err != nil || code != test.code {
					t.Errorf("exit code %d, %v; want %d", code, err, test.code)
				}
				golden(t, "check-"+test.name+"-"+output, out.String())
			})
		}
	}
}

// changes are the changes of a restore in two tables.
func changes() []api.TableChange {
	return []api.TableChange{
		{Family: rules.IPv4, Table: rules.Nat, Adds: api.Counts{Rules: 1}, Removes: api.Counts{Rules: 93, Chains: 30}, Reorders: 1, Removal: "0123"},
		{Family: rules.IPv6, Table: rules.Filter, Adds: api.Counts{Rules: 2, Chains: 1}},
	}
}

// TestRestoreAsks: removals are refused without --yes, with a remedy. --yes agrees only to the
// removals of a dry run right before.
func TestRestoreAsks(t *testing.T) {
	for _, test := range []struct {
		name    string
		o       options
		reply   api.RestoreReply
		code    int
		message string
		asked   []api.RestoreRequest
	}{
		{"refused", options{}, api.RestoreReply{Refused: "x", Changes: changes()}, exitError,
			"nothing was written: it would remove 93 protected rules and 30 chains; --dry-run shows them, --yes agrees to that",
			[]api.RestoreRequest{{Generation: "g"}}},
		{"dry run", options{dryRun: true, yes: true}, api.RestoreReply{Changes: changes()}, exitOK, "", []api.RestoreRequest{{Generation: "g", DryRun: true}}},
		{"agreed", options{yes: true}, api.RestoreReply{Changes: changes(), Outcomes: map[rules.Family]api.Outcome{rules.IPv4: reload.Proved}}, exitOK, "",
			[]api.RestoreRequest{{Generation: "g", DryRun: true}, {Generation: "g", Agreed: reload.Agreement{rules.IPv4.Table(rules.Nat): "0123"}}}},
		{"another process wrote", options{yes: true}, api.RestoreReply{Refused: "x", Changes: changes()}, exitError,
			"nothing was written: it would remove 93 protected rules and 30 chains, others than a moment ago, because another process wrote meanwhile; run it again",
			[]api.RestoreRequest{{Generation: "g", DryRun: true}, {Generation: "g", Agreed: reload.Agreement{rules.IPv4.Table(rules.Nat): "0123"}}}},
		{"half of it", options{yes: true}, api.RestoreReply{Refused: "it would remove: ipv6 nat", Outcomes: map[rules.Family]api.Outcome{rules.IPv4: reload.Proved, rules.IPv6: reload.Failed}}, exitError,
			"not everything was written, because another process wrote meanwhile: it would remove: ipv6 nat; look at it with --dry-run", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var asked []api.RestoreRequest
			test.o.generation, test.o.output = "g", "table"
			var out bytes.Buffer
			code, err := test.o.restoreBy(t.Context(), streams{out: &out}, func(_ context.Context, r api.RestoreRequest) (api.RestoreReply, error) {
				asked = append(asked, r)
				return test.reply, nil
			})
			message := ""
			if err != nil {
				message = err.Error()
			}
			if code != test.code || message != test.message {
				t.Errorf("exit code %d and %q, want %d and %q", code, message, test.code, test.message)
			}
			if test.asked != nil {
				if diff := cmp.Diff(test.asked, asked); diff != "" {
					t.Errorf("asked (-want +got):\n%s", diff)
				}
			}
		})
	}
}

// TestPreviewTable: a dry run shows its counts, and the rules themselves.
func TestPreviewTable(t *testing.T) {
	reply := api.RestoreReply{Generation: "0123456789ab", Changes: changes(), Detail: "left as it is, because it cannot be read: ipv6 nat: no"}
	reply.Changes[0].Lines, reply.Changes[0].More = []string{"-:KUBE-SVC-A - [0:0]", "--A KUBE-SVC-A -j RETURN", "+-A KUBE-SVC-B -j RETURN"}, 120
	reply.Changes[1].Lines = []string{"+-A INPUT -j KUBE-FIREWALL"}
	var out bytes.Buffer
	if err := printPreview(&out, "table", reply); err != nil {
		t.Error(err)
	}
	if err := printPreview(&out, "table", api.RestoreReply{}); err != nil {
		t.Error(err)
	}
	golden(t, "restore-preview", out.String())
}

func TestRestoreTable(t *testing.T) {
	for _, test := range []struct {
		name  string
		reply api.RestoreReply
		code  int
	}{
		{"proved", api.RestoreReply{Generation: "0123456789ab", Outcomes: map[rules.Family]api.Outcome{
			rules.IPv4: reload.Proved, rules.IPv6: reload.Skipped,
		}}, exitOK},
		{"failed", api.RestoreReply{Generation: "0123456789ab", Outcomes: map[rules.Family]api.Outcome{
			rules.IPv4: reload.Partial, rules.IPv6: reload.Proved,
		}, Detail: "iptables-nft-restore refused the rules (missing_set, exit 2): set NOSUCH does not exist"}, exitNo},
		{"nothing", api.RestoreReply{Generation: "0123456789ab"}, exitNo},
		{"removed", api.RestoreReply{Generation: "0123456789ab", Undo: "ba9876543210", Outcomes: map[rules.Family]api.Outcome{
			rules.IPv4: reload.Proved,
		}, Changes: changes()}, exitOK},
		{"refused", api.RestoreReply{Generation: "0123456789ab", Refused: "too much", Changes: changes()}, exitNo},
	} {
		for _, output := range []string{"table", "json"} {
			t.Run(test.name+" "+output, func(t *testing.T) {
				var out bytes.Buffer
				code, err := printReply(&out, output, test.reply)
				if err != nil || code != test.code {
					t.Errorf("exit code %d, %v; want %d", code, err, test.code)
				}
				golden(t, "restore-"+test.name+"-"+output, out.String())
			})
		}
	}
}

// TestDefaultsAreGood: complete accepts all defaults.
func TestDefaultsAreGood(t *testing.T) {
	for _, c := range commands() {
		o := &options{}
		flags := o.flagSet(c)
		if err := flags.Parse(nil); err != nil {
			t.Fatal(err)
		}
		if err := o.complete(c, flags); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// A pauser answers every pause.
type pauser struct{ control.Controller }

func (pauser) Pause(context.Context, api.PauseRequest) (api.PauseReply, error) {
	return api.PauseReply{}, nil
}

func (pauser) Alive() error { return nil }

// TestOutputThatCannotBeWritten: a command that could not print its answer has failed.
func TestOutputThatCannotBeWritten(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	socket := serveControl(t, pauser{})
	for _, args := range [][]string{{"version"}, {"man"}, {"completion"}, {"pause", "--socket=" + socket}, {"health", "live", "--socket=" + socket}} {
		var stderr bytes.Buffer
		code := run(t.Context(), args, streams{out: full, err: &stderr})
		if code != exitError || !strings.Contains(stderr.String(), "no space left on device") {
			t.Errorf("canaryd %s: exit code %d and %q, want %d and the reason", args, code, stderr.String(), exitError)
		}
	}
}
