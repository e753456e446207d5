package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A lossyNode is a namespace whose rules were flushed, in both families, and the
// Kernel that had read them.
type lossyNode struct {
	kernel *Kernel
	known  map[rules.Family][]rules.Rule
	saved  map[rules.Family]string // of the last text
}

const lossyRules = `*mangle
:M - [0:0]
-A M -m comment --comment canary
COMMIT
*nat
:OUTPUT ACCEPT [0:0]
:SVC - [0:0]
:SEP - [0:0]
-A OUTPUT -m comment --comment portals -j SVC
-A SVC -p tcp -m comment --comment "a service" -m statistic --mode random --probability 0.5 -j SEP
-A SEP ! -p udp -m mark --mark 0x4000/0x4000 -j RETURN
-A SEP -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 8080
COMMIT
`

// newLossyNode loads and flushes one text after the other.
func newLossyNode(t *testing.T, cfg Config, texts ...string) *lossyNode {
	t.Helper()
	nstest.NeedProgram(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	cfg.Backend = NFT
	n := &lossyNode{kernel: openKernel(t, cfg), known: map[rules.Family][]rules.Rule{}, saved: map[rules.Family]string{}}
	for _, text := range texts {
		for _, family := range rules.Families() {
			runTool(t, text, program(NFT, family, "-restore"))
			n.saved[family] = saveNFT(t, family)
			for _, table := range mustRead(t, n.kernel, family).Tables {
				for _, c := range table.Chains {
					n.known[family] = append(n.known[family], c.Rules...)
				}
			}
		}
		flushRuleset(t)
	}
	return n
}

// payload returns the scripts that bring a text back, for both families, with the
// rules as they were read.
func (n *lossyNode) payload(t *testing.T, text string) Payload {
	t.Helper()
	p := Payload{}
	for _, family := range rules.Families() {
		p[family] = scriptsOf(t, text)
		for _, s := range p[family] {
			for i := range s.Steps {
				if at := slices.IndexFunc(n.known[family], s.Steps[i].Rule.Equal); at >= 0 {
					s.Steps[i].Rule = n.known[family][at]
				}
			}
		}
	}
	return p
}

func (n *lossyNode) read(t *testing.T) Session {
	t.Helper()
	s := begin(t, n.kernel)
	for _, family := range rules.Families() {
		mustRead(t, s, family)
	}
	return s
}

func (n *lossyNode) wantSaved(t *testing.T, want map[rules.Family]string) {
	t.Helper()
	for family, text := range want {
		if diff := cmp.Diff(text, saveNFT(t, family)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", family, diff)
		}
	}
}

func onNamespace(t *testing.T, body func(t *testing.T)) {
	t.Parallel()
	nstest.Run(t, body)
}

func tablesNamed(w Written) string { return fmt.Sprint(w.Direct) }

func TestBothFamiliesAndAllTablesAreOneTransaction(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n := newLossyNode(t, Config{}, lossyRules)
		s := n.read(t)
		before := mustStamp(t, n.kernel, rules.IPv4).Value
		for family, w := range s.Restore(t.Context(), n.payload(t, lossyRules)) {
			if w.Err != nil || w.Raced || w.Detour != nil || tablesNamed(w) != "[mangle nat]" {
				t.Errorf("%v: %+v", family, w)
			}
		}
		n.wantSaved(t, n.saved)
		if moved := mustStamp(t, n.kernel, rules.IPv4).Value - before; moved != 1 {
			t.Errorf("the ruleset's counter moved by %d: want one transaction", moved)
		}
		// Our own write does not count as another process's.
		for _, family := range rules.Families() {
			if snapshot := mustRead(t, s, family); snapshot.Moved {
				t.Errorf("%v: the next read says that somebody else wrote", family)
			}
		}
	})
}

// A Kernel that has read a ruleset writes it directly, with marks that it has
// never met.
func TestAKernelWritesDirectlyWhatItHasRead(t *testing.T) {
	clusters := corpusTexts(t)
	onNFT(t, func(t *testing.T, family rules.Family) {
		k := openKernel(t, Config{Backend: NFT})
		r := rand.New(rand.NewPCG(directSeed(t), uint64(family)))
		for i, name := range slices.Sorted(maps.Keys(clusters)) {
			if clusters[name].family != family || !netns.Root() && len(clusters[name].text) > 100_000 {
				continue
			}
			flushRuleset(t)
			runTool(t, clusters[name].text, program(NFT, family, "-restore"))
			want := mustRead(t, k, family).Tables
			before := saveNFT(t, family)
			flushed := flushRandomly(t, r, family, want)
			s := begin(t, k)
			scripts := scriptsFor(r, want, mustRead(t, s, family).Tables)
			mark := rules.Rule{Spec: fmt.Sprintf(`-m comment --comment "canaryd-canary:%d"`, i)}
			scripts = append(scripts, Script{Table: rules.Raw, Declare: []string{"CANARY"}, Steps: []Step{{Verb: Append, Chain: "CANARY", Rule: mark}}})
			w := s.Restore(t.Context(), Payload{family: scripts})[family]
			if w.Err != nil || w.Raced || w.Detour != nil || len(w.Direct) != len(want)+1 {
				t.Fatalf("%s after %s: %+v", name, flushed, w)
			}
			after := mustRead(t, s, family)
			if after.Moved {
				t.Errorf("%s: somebody else is said to have written", name)
			}
			if diff := cmp.Diff([]rules.Rule{mark}, after.Tables[rules.Raw].Chain("CANARY").Rules); diff != "" {
				t.Errorf("%s: the mark (-want +got):\n%s", name, diff)
			}
			nft := map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[family]
			runTool(t, "delete table "+nft+" raw", "nft", "-f", "-")
			if diff := cmp.Diff(before, saveNFT(t, family)); diff != "" {
				t.Fatalf("%s after %s: (-before +after)\n%s", name, flushed, diff)
			}
		}
	})
}

func TestACommitBetweenReadAndReplayMakesItStale(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n := newLossyNode(t, Config{}, lossyRules)
		s := n.read(t)
		genid := uint32(mustStamp(t, n.kernel, rules.IPv4).Value)
		runTool(t, "", "iptables-nft", "-N", "FOREIGN")
		empty := map[rules.Family]string{}
		for _, family := range rules.Families() {
			empty[family] = saveNFT(t, family)
		}
		// If no process compares the genid before sending, the kernel does.
		if got := restoreDirectly(n.kernel, genid, n.payload(t, lossyRules)); !errors.Is(got.err, nft.ErrStale) {
			t.Errorf("a batch with a genid of the past: %+v, want ErrStale", got)
		}
		n.wantSaved(t, empty)
		for family, w := range s.Restore(t.Context(), n.payload(t, lossyRules)) {
			if !errors.Is(w.Err, nft.ErrStale) {
				t.Errorf("%v: %+v, want ErrStale", family, w)
			}
		}
		n.wantSaved(t, empty)
		if got := restoreDirectly(n.kernel, nft.NoGuard, n.payload(t, lossyRules)); got.err != nil || len(got.left) > 0 || got.moved != 1 {
			t.Errorf("without a guard: %+v", got)
		}
		for family, w := range s.RestoreAnyway(t.Context(), n.payload(t, lossyRules)) {
			if w.Err != nil || !w.Raced || tablesNamed(w) != "[mangle nat]" {
				t.Errorf("anyway, %v: %+v", family, w)
			}
		}
	})
}

// A Kernel recognises its own commits in a namespace by their netlink address.
// Its threads have many numbers, which differ in a pod.
func TestAReplayKnowsItsOwnCommits(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n := newLossyNode(t, Config{}, lossyRules)
		subscribe := func(k *Kernel) *nft.Subscription {
			s, err := k.Subscribe()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
			return s
		}
		ours, theirs := subscribe(n.kernel), subscribe(openKernel(t, Config{Backend: NFT}))
		runTool(t, "", "iptables-nft", "-N", "FOREIGN")
		if got := restoreDirectly(n.kernel, nft.NoGuard, n.payload(t, lossyRules)); got.err != nil || got.moved != 1 {
			t.Fatalf("the replay: %+v", got)
		}
		runTool(t, "", "iptables-nft", "-X", "FOREIGN")
		for name, c := range map[string]struct {
			heard *nft.Subscription
			want  []bool
		}{
			"the Kernel that replayed": {ours, []bool{false, true, false}},
			"another Kernel":           {theirs, []bool{false, false, false}},
		} {
			for i, want := range c.want {
				commit, err := c.heard.Receive()
				if err != nil {
					t.Fatal(err)
				}
				if commit.Own != want {
					t.Errorf("%s: commit %d is its own: %t, want %t (%+v)", name, i, commit.Own, want, commit)
				}
			}
		}
	})
}

// Another process commits without a pause. A direct replay either follows the
// state that it read, or is stale and has written nothing.
func TestADirectReplayBesideABusyWriter(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n := newLossyNode(t, Config{}, lossyRules)
		runTool(t, "", "iptables-nft", "-N", "FOREIGN")
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			defer stop()
			for ctx.Err() == nil {
				for _, verb := range []string{"-A", "-D"} {
					if _, err := tryTool(t, "", "iptables-nft", verb, "FOREIGN", "-j", "RETURN"); err != nil {
						done <- err
						return
					}
				}
			}
			done <- nil
		}()
		payload, stale, written := n.payload(t, lossyRules), 0, 0
		for enough := testkit.Size(10, 50); (stale < enough || written < enough) && ctx.Err() == nil; {
			genid := uint32(mustStamp(t, n.kernel, rules.IPv4).Value)
			if stale < written { // let the writer commit
				for uint32(mustStamp(t, n.kernel, rules.IPv4).Value) == genid && ctx.Err() == nil {
				}
			}
			switch got := restoreDirectly(n.kernel, genid, payload); {
			case errors.Is(got.err, nft.ErrStale):
				stale++
			case got.err != nil || len(got.detour) > 0:
				t.Fatalf("%+v", got)
			default:
				written++
				if got := uint32(mustStamp(t, n.kernel, rules.IPv4).Value); got-genid == 0 {
					t.Fatal("written, and the counter stands")
				}
			}
		}
		stop()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		t.Logf("%d stale, %d written", stale, written)
	})
}

const looping = `*filter
:A - [0:0]
:B - [0:0]
:INPUT ACCEPT [0:0]
-A A -j B
-A INPUT -j A
COMMIT
`

// newLoopingNode returns a lossyNode, and a table that the kernel refuses. The
// Kernel read its rules separately, and together they are a loop.
func newLoopingNode(t *testing.T) (n *lossyNode, loop string) {
	t.Helper()
	n = newLossyNode(t, Config{}, looping, lossyRules, "*filter\n:A - [0:0]\n:B - [0:0]\n-A B -j A\nCOMMIT\n")
	return n, strings.Replace(looping, "COMMIT", "-A B -j A\nCOMMIT", 1)
}

// The kernel refuses a loop, which nothing shows before. Then iptables-restore
// writes all other tables, and names the fault of that table.
func TestARefusedTransactionGoesThroughTheTextPathAtOnce(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n, bad := newLoopingNode(t)
		p := n.payload(t, lossyRules+bad)
		p[rules.IPv6] = p[rules.IPv6][:2]
		s := n.read(t)
		written := s.Restore(t.Context(), p)
		var refused *RestoreError
		if w := written[rules.IPv4]; !errors.As(w.Err, &refused) || len(w.Direct) > 0 || !errors.Is(w.Detour, unix.EMLINK) {
			t.Errorf("ipv4: %+v", w)
		} else if refused.Program != "iptables-nft-restore" {
			t.Errorf("the refusal is %s's", refused.Program)
		}
		if w := written[rules.IPv6]; w.Detour == nil || len(w.Direct) > 0 {
			t.Errorf("ipv6: %+v", w)
		}
		if v4 := saveNFT(t, rules.IPv4); !strings.Contains(v4, "-A SVC") || strings.Contains(v4, "-A B") {
			t.Errorf("of ipv4 stands:\n%s", v4)
		}

		n.kernel.cfg.Replay = ReplayDirect
		flushRuleset(t)
		for family, w := range n.read(t).Restore(t.Context(), p) {
			if !errors.As(w.Err, &refused) || refused.Program != "nf_tables" || refused.Reason != ReasonOther {
				t.Errorf("direct and nothing else, %v: %+v", family, w)
			}
		}
		if v6 := saveNFT(t, rules.IPv6); v6 != "" {
			t.Errorf("a refused transaction wrote:\n%s", v6)
		}
	})
}

// A -D without a matching rule fails its table, and is reported as usual: marks
// use it as a comparison.
func TestADeletionThatFindsNothingFailsItsTableOnly(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n := newLossyNode(t, Config{}, lossyRules)
		p := n.payload(t, lossyRules)
		delete(p, rules.IPv6)
		p[rules.IPv4][0].Declare = nil
		p[rules.IPv4][0].Steps = append([]Step{{Verb: Delete, Chain: "M", Rule: p[rules.IPv4][0].Steps[0].Rule}}, p[rules.IPv4][0].Steps...)
		runTool(t, "", "iptables-nft", "-t", "mangle", "-N", "M")
		w := n.read(t).Restore(t.Context(), p)[rules.IPv4]
		var refused *RestoreError
		if !errors.As(w.Err, &refused) || tablesNamed(w) != "[nat]" || w.At.IsZero() {
			t.Errorf("%+v", w)
		}
		if got := saveNFT(t, rules.IPv4); strings.Contains(got, "-A M") || !strings.Contains(got, "-A SVC") {
			t.Errorf("there stands:\n%s", got)
		}
		p[rules.IPv4] = p[rules.IPv4][:1]
		if w := n.read(t).Restore(t.Context(), p)[rules.IPv4]; !errors.As(w.Err, &refused) || !w.At.IsZero() {
			t.Errorf("nothing was written, and it says: %+v", w)
		}
	})
}

func TestTheDirectPathNeedsPrivileges(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		conn := dialTest(t)
		genid, err := conn.Genid()
		if err != nil {
			t.Fatal(err)
		}
		dropNetAdmin(t)
		b := guardedBatch(genid)
		b.Finish()
		if err := b.Send(); !errors.Is(err, nft.ErrPermission) {
			t.Errorf("without CAP_NET_ADMIN: %v", err)
		}
	})
}

// Missing built-in chains are made as iptables makes them. Existing chains keep
// their policy and their rules' handles.
func TestBuiltInChainsAreMadeAsIptablesMakesThem(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		conn, k := dialTest(t), openKernel(t, Config{Backend: NFT})
		var text strings.Builder
		var scripts []Script
		for _, table := range rules.AllTables() {
			fmt.Fprintf(&text, "*%s\n", table)
			s := Script{Table: table}
			for _, chain := range rules.BuiltinChains(table) {
				fmt.Fprintf(&text, "-A %s -j ACCEPT\n", chain)
				s.Steps = append(s.Steps, Step{Verb: Append, Chain: chain, Rule: rules.Rule{Spec: "-j ACCEPT", Target: "ACCEPT"}})
			}
			text.WriteString("COMMIT\n")
			scripts = append(scripts, s)
		}
		runTool(t, text.String(), program(NFT, family, "-restore"), "--noflush")
		mustRead(t, k, family)
		listed := func() string { return sortedChains(runTool(t, "", "nft", "list", "ruleset")) }
		want := listed()
		flushRuleset(t)
		restoreAll(t, k, family, scripts...)
		if diff := cmp.Diff(want, listed()); diff != "" {
			t.Errorf("nft lists (-iptables +direct):\n%s", diff)
		}

		tool := program(NFT, family, "")
		runTool(t, "", tool, "-P", "FORWARD", "DROP")
		runTool(t, "", tool, "-A", "FORWARD", "-p", "udp", "-j", "DROP")
		handles := func() []uint64 {
			var all []uint64
			if err := conn.EachRule(family, rules.Filter, "FORWARD", func(m nft.RuleMessage) error {
				all = append(all, m.Handle)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			return all
		}
		before := handles()
		accept := rules.Rule{Spec: "-j ACCEPT", Target: "ACCEPT"}
		restoreAll(t, k, family, Script{Table: rules.Filter, Steps: []Step{
			{Verb: Insert, Chain: "FORWARD", Index: 2, Rule: accept}, {Verb: Insert, Chain: "FORWARD", Rule: accept}, {Verb: Append, Chain: "FORWARD", Rule: accept},
		}})
		after := handles()
		if len(before) != 2 || len(after) != 5 || after[1] != before[0] || after[3] != before[1] {
			t.Errorf("FORWARD's handles were %v and are %v", before, after)
		}
		if got := saveNFT(t, family); !strings.Contains(got, ":FORWARD DROP") {
			t.Errorf("the policy is gone:\n%s", got)
		}
	})
}

// sortedChains sorts nft's list, so that it does not depend on which chain was
// made first.
func sortedChains(text string) string {
	lines := strings.Split(text, "\n")
	var blocks []string
	table := ""
	for i := 0; i < len(lines); i++ {
		switch line := strings.TrimSpace(lines[i]); {
		case strings.HasPrefix(line, "table "):
			table = line
		case strings.HasPrefix(line, "chain "):
			end := i + slices.Index(lines[i:], "\t}")
			blocks = append(blocks, table+"\n"+strings.Join(lines[i:end], "\n"))
			i = end
		}
	}
	slices.Sort(blocks)
	return strings.Join(blocks, "\n")
}

// In a user namespace the send buffer may not be raised. A transaction that is
// too large is left to iptables-restore, and no part of it is sent.
func TestATransactionThatIsTooLargeIsNotSent(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		conn := dialTest(t)
		genid, err := conn.Genid()
		if err != nil {
			t.Fatal(err)
		}
		b := guardedBatch(genid)
		b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, rules.IPv4)
		b.Text(unix.NFTA_TABLE_NAME, "filter")
		b.End()
		most, err := os.ReadFile("/proc/sys/net/core/wmem_max")
		if err != nil {
			t.Fatal(err)
		}
		limit, err := strconv.Atoi(strings.TrimSpace(string(most)))
		if err != nil {
			t.Fatal(err)
		}
		for range 2*limit/60_000 + 1 { // SO_SNDBUF doubles its value
			b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, rules.IPv4)
			b.Text(unix.NFTA_TABLE_NAME, "filter")
			b.Blob(1000, make([]byte, 60_000)) // without a meaning
			b.End()
		}
		b.Finish()
		err = b.Send()
		exists, err2 := conn.HasTable(rules.IPv4, rules.Filter)
		if err2 != nil {
			t.Fatal(err2)
		}
		if netns.Root() {
			if err != nil || !exists {
				t.Errorf("as root: %v, and the table's existence is %t", err, exists)
			}
		} else if !errors.Is(err, nft.ErrTooBig) || exists {
			t.Errorf("in a user namespace: %v, and the table's existence is %t", err, exists)
		}
	})
}

func TestDirectReplayIsForNFTOnly(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		_, err := Open(t.Context(), Config{Backend: Legacy, Replay: ReplayDirect})
		want := "a direct replay needs the nft backend, and this is legacy: use --replay=auto"
		if err == nil || err.Error() != want {
			t.Errorf("Open: %v, want %q", err, want)
		}
		if _, err := Open(t.Context(), Config{Replay: "x"}); err == nil {
			t.Error("any word is a replay")
		}
		n := newLossyNode(t, Config{Replay: ReplayText}, lossyRules)
		for family, w := range n.read(t).Restore(t.Context(), n.payload(t, lossyRules)) {
			if w.Err != nil || len(w.Direct) > 0 || w.Detour != nil {
				t.Errorf("as text, %v: %+v", family, w)
			}
		}
		n.wantSaved(t, n.saved)
	})
}
