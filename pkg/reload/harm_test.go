package reload

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A harmPacket is a packet with the properties that the rules of these tests match.
type harmPacket struct {
	source, port string
	mark         uint32 // before the table's first rule
}

// harmPackets returns all packets that the rules of these tests can distinguish.
func harmPackets() (all []harmPacket) {
	for i := range 6 {
		for _, port := range []string{"80", "443"} {
			for mark := range uint32(2) {
				all = append(all, harmPacket{fmt.Sprintf("10.0.0.%d", i), port, mark})
			}
		}
	}
	return all
}

// harmSet returns an ipset of these tests. Set sN has the member 10.0.0.N.
func harmSet(i int) iptables.Set {
	return iptables.Set{Name: fmt.Sprintf("s%d", i), Create: "hash:ip family inet", Members: []string{fmt.Sprintf("10.0.0.%d", i)}}
}

// A harmWalk takes a packet through the rules of a table.
type harmWalk struct {
	t      *testing.T
	table  *rules.Table
	packet harmPacket
	conn   uint32 // the connection's mark
}

// fate returns the fate of a packet in a built-in chain: ACCEPT or DROP; in nat also the target
// that translates it.
func (w *harmWalk) fate(builtin string) string {
	if w.table == nil || w.table.Chain(builtin) == nil {
		return "ACCEPT"
	}
	if verdict, _ := w.chain(builtin); verdict != "" {
		return verdict
	}
	return w.table.Chain(builtin).Policy
}

// chain returns the verdict of a chain, "" if the packet returns.
func (w *harmWalk) chain(name string) (verdict string, leaves bool) {
	for _, r := range w.table.Rules(name) {
		if !w.matches(r) {
			continue
		}
		switch {
		case r.Target == "RETURN":
			return "", false
		case w.table.Chain(r.Target) != nil:
			if verdict, _ := w.chain(r.Target); verdict != "" || strings.HasSuffix(r.Spec, "-g "+r.Target) {
				return verdict, true
			}
		case r.Target == "REJECT":
			return "DROP", false
		case r.Target == "ACCEPT", r.Target == "DROP", r.Target == "MASQUERADE":
			return r.Target, false
		case strings.HasSuffix(r.Target, "MARK"):
			w.mark(r)
		case r.Target == "", r.Target == "LOG":
		default:
			w.t.Fatalf("a rule of %s that the walk does not know: %s", name, r.Spec)
		}
	}
	return "", false
}

// mark applies a MARK or CONNMARK.
func (w *harmWalk) mark(r rules.Rule) {
	var value, mask uint32
	_, err := fmt.Sscanf(r.Spec[strings.Index(r.Spec, r.Target):], r.Target+" --set-xmark 0x%x/0x%x", &value, &mask)
	switch {
	case strings.Contains(r.Spec, "--save-mark"):
		w.conn = w.packet.mark
	case strings.Contains(r.Spec, "--restore-mark"):
		w.packet.mark = w.conn
	case err != nil:
		w.t.Fatalf("a mark that the walk does not know: %s", r.Spec)
	case r.Target == "MARK":
		w.packet.mark = w.packet.mark&^mask ^ value
	default:
		w.conn = w.conn&^mask ^ value
	}
}

func (w *harmWalk) matches(r rules.Rule) bool {
	words, err := rules.Split(r.Spec)
	must(w.t, err)
	mark := w.packet.mark
	for i := 0; i < len(words); i++ {
		switch words[i] {
		case "connmark":
			mark = w.conn
		case "--mark":
			var value, mask uint32
			_, err := fmt.Sscanf(words[i+1], "0x%x/0x%x", &value, &mask)
			must(w.t, err)
			if (mark&mask == value) == (words[i-1] == "!") {
				return false
			}
		case "-s":
			if words[i+1] != w.packet.source+"/32" {
				return false
			}
		case "--dport":
			if words[i+1] != w.packet.port {
				return false
			}
		case "--match-set":
			if "10.0.0."+words[i+1][1:] != w.packet.source {
				return false
			}
		}
	}
	return true
}

// A harmNode draws rules, and judges the fates of packets.
type harmNode struct {
	*testNode
	*rand.Rand
	table    rules.TableName
	builtins []string
	ownLine  func(builtin string, r rules.Rule) bool // reports whether a rule of a built-in chain is guarded
	whole    *rules.Table                            // with all rules
	flushed  []map[string]string                     // the fates that flushes left
}

// drawn returns rules at random: protected chains, with rules that may need ipsets, and chains of
// others that they lead to. Each chain leads only to later chains.
func (h *harmNode) drawn(protected, foreign int) string {
	var chains []string
	for i := range protected {
		chains = append(chains, fmt.Sprintf("KUBE-P%d", i))
	}
	for i := range foreign {
		chains = append(chains, fmt.Sprintf("corp%d", i))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n", h.table)
	for _, builtin := range h.builtins {
		policy := "ACCEPT"
		if h.table == rules.Filter && h.IntN(2) == 0 {
			policy = "DROP"
		}
		fmt.Fprintf(&b, ":%s %s [0:0]\n", builtin, policy)
	}
	for _, c := range chains {
		fmt.Fprintf(&b, ":%s - [0:0]\n", c)
	}
	for _, builtin := range h.builtins {
		jumps := map[string]bool{} // no owner writes one twice
		for range 1 + h.IntN(4) {
			jump := fmt.Sprintf("-A %s %s-j %s\n", builtin, h.match(h.IntN(3)), chains[h.IntN(protected)])
			if !jumps[jump] {
				b.WriteString(jump)
			}
			jumps[jump] = true
			if h.IntN(4) == 0 {
				fmt.Fprintf(&b, "-A %s %s-j %s\n", builtin, h.match(h.IntN(2)), h.verdict())
			}
		}
	}
	for i, c := range chains {
		for range h.IntN(6) {
			target := h.verdict()
			if i+1 < len(chains) && h.IntN(3) == 0 {
				target = chains[i+1+h.IntN(len(chains)-i-1)]
				if h.IntN(6) == 0 {
					fmt.Fprintf(&b, "-A %s %s-g %s\n", c, h.match(h.IntN(3)), target)
					continue
				}
			}
			fmt.Fprintf(&b, "-A %s %s-j %s\n", c, h.match(h.IntN(4)), target)
		}
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

func (h *harmNode) match(kind int) string {
	if h.IntN(5) == 0 {
		bit := 1 << h.IntN(2)
		match, not := []string{"mark", "mark", "connmark"}[h.IntN(3)], []string{"", "! "}[h.IntN(2)]
		return fmt.Sprintf("%s-m %s %s--mark 0x%x/0x%x ", h.match(kind), match, not, bit, bit)
	}
	switch kind {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("-s 10.0.0.%d/32 ", h.IntN(6))
	case 2:
		return fmt.Sprintf("-p tcp -m tcp --dport %s ", []string{"80", "443"}[h.IntN(2)])
	default:
		return fmt.Sprintf("-m set --match-set s%d src ", h.IntN(6))
	}
}

func (h *harmNode) verdict() string {
	if h.IntN(4) == 0 {
		return []string{
			"MARK --set-xmark 0x1/0x1", "MARK --set-xmark 0x2/0x2", "MARK --set-xmark 0x0/0x1", "MARK --set-xmark 0x1/0x0",
			"CONNMARK --set-xmark 0x1/0x1", "CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
			"CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		}[h.IntN(7)]
	}
	if h.table == rules.Nat {
		return []string{"ACCEPT", "MASQUERADE", "MASQUERADE", "RETURN"}[h.IntN(4)]
	}
	return []string{"ACCEPT", "ACCEPT", "DROP", "DROP", "REJECT", "RETURN", "LOG"}[h.IntN(7)]
}

// fates returns the fate of each packet in each built-in chain.
func (h *harmNode) fates(table *rules.Table) map[string]string {
	all := map[string]string{}
	for _, builtin := range h.builtins {
		for _, p := range harmPackets() {
			all[fmt.Sprintf("%s %s:%s mark %#x", builtin, p.source, p.port, p.mark)] = (&harmWalk{t: h.t, table: table, packet: p}).fate(builtin)
		}
	}
	return all
}

func (h *harmNode) seen() *rules.Table {
	h.t.Helper()
	snapshot, err := h.Fake.Read(h.t.Context(), v4)
	must(h.t, err)
	return snapshot.Tables[h.table]
}

// complete returns the table with all rules, except for others' rules in built-in chains that were
// flushed: these rules stay lost.
func (h *harmNode) complete() *rules.Table {
	table, seen := h.whole, h.seen()
	for _, builtin := range h.builtins {
		c := *table.Chain(builtin)
		c.Rules = slices.DeleteFunc(slices.Clone(c.Rules), func(r rules.Rule) bool {
			return !h.ownLine(builtin, r) && !slices.ContainsFunc(seen.Rules(builtin), r.Equal)
		})
		table = table.With(c)
	}
	return table
}

// unharmed fails if a packet is let in, or translated, that neither all rules nor a flush let in.
func (h *harmNode) unharmed(when string) {
	h.t.Helper()
	lets := func(fate string) bool { return fate == "MASQUERADE" || fate == "ACCEPT" && h.table == rules.Filter }
	whole := h.fates(h.complete())
	for place, fate := range h.fates(h.seen()) {
		let := lets(whole[place])
		for _, flushed := range h.flushed {
			let = let || lets(flushed[place])
		}
		if lets(fate) && !let {
			h.t.Errorf("%s: %s meets %s; with all rules it met %s, and so it did after each flush", when, place, fate, whole[place])
		}
	}
}

// destroySets destroys all ipsets that the bits select, as a flusher of ipsets does.
func (h *harmNode) destroySets(bits int) {
	for i := range 6 {
		if bits&(1<<i) != 0 {
			h.Sets().Destroy(harmSet(i).Name)
			delete(h.job.Sets, harmSet(i).Name)
		}
	}
}

// flush flushes in one of several ways.
func (h *harmNode) flush() (how string) {
	h.t.Helper()
	table := h.seen()
	switch h.IntN(6) {
	case 5: // a file from before some of the rules
		var old strings.Builder
		for line := range strings.Lines(strings.NewReplacer("canaryd-canary:", "canaryd-canary:0", "canaryd-witness:", "canaryd-witness:0").Replace(h.SaveTable(v4, h.table))) {
			if !strings.HasPrefix(line, "-A KUBE-P") || h.IntN(3) > 0 {
				old.WriteString(line)
			}
		}
		if h.Restore(v4, old.String()) == nil {
			return "iptables-restore"
		}
		must(h.t, h.Flush(v4, h.table, "")) // a set that the file names is gone
		return "-F"
	case 0:
		must(h.t, h.Flush(v4, h.table, ""))
		return "-F"
	case 1:
		must(h.t, h.Flush(v4, h.table, ""))
		must(h.t, h.DeleteChains(v4, h.table))
		return "-F -X"
	case 2:
		if h.Info().Backend == iptables.NFT {
			must(h.t, h.FlushRuleset())
			return "flush ruleset"
		}
		fallthrough
	default: // some chains, and perhaps the canary
		var which []string
		for _, c := range table.Chains {
			if h.IntN(2) == 0 {
				must(h.t, h.Flush(v4, h.table, c.Name))
				which = append(which, c.Name)
			}
		}
		return "-F " + strings.Join(which, ", ")
	}
}

func newHarmNode(t *testing.T, backend iptables.Backend, seed uint64, table rules.TableName) *harmNode {
	t.Helper()
	h := &harmNode{Rand: rand.New(rand.NewPCG(seed, 1)), table: table, builtins: []string{"INPUT", "FORWARD"}}
	if table == rules.Nat {
		h.builtins = []string{"POSTROUTING"}
	}
	h.testNode = &testNode{Fake: iptablestest.NewFake(backend, v4), t: t, before: map[rules.Family]string{}}
	protection := rules.Protection{Chain: protects, Follow: func(string) bool { return true }}
	h.ownLine = func(_ string, r rules.Rule) bool { return protects(r.Target) }
	h.replayer = Replayer{Kernel: h.Fake, Canary: canary.DefaultChain, Protection: protection, Supplier: h.Sets()}
	h.job = Job{Families: []rules.Family{v4}, Generation: rules.Generation{}, Sets: map[string]iptables.Set{}, Quiet: map[rules.Family]bool{v4: true}}
	for i := range 6 {
		h.Sets().Put(harmSet(i))
		h.job.Sets[harmSet(i).Name] = harmSet(i)
	}
	text := h.drawn(2+h.IntN(5), h.IntN(4))
	must(t, h.RestoreNoflush(v4, text))
	for _, table := range protect.Always() {
		snapshot, err := h.Fake.Read(t.Context(), v4)
		must(t, err)
		if seen := snapshot.Tables[table]; seen != nil {
			h.job.Generation = h.job.Generation.With(v4.Table(table), protection.Extract(seen, canary.IsMark))
		}
	}
	result, err := h.replayer.Plant(t.Context(), h.job)
	must(t, err)
	h.take(result)
	h.whole = h.seen()
	return h
}

// TestAReplayDoesNoHarm draws rules, flushes them in some way, and destroys ipsets that some of
// them need. It takes packets through the rules before, in between, and after the replay. Then it
// puts the sets back one after the other.
func TestAReplayDoesNoHarm(t *testing.T) {
	draws := testkit.Size(60, 250)
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, table := range []rules.TableName{rules.Filter, rules.Nat} {
			t.Run(fmt.Sprintf("%s %s", backend, table), func(t *testing.T) {
				short := 0
				// In 3382 a chain was emptied alone. It becomes a loss when a jump to it is back,
				// and that write is not proved.
				for _, seed := range append(seeds(draws), 3382) {
					if t.Run(fmt.Sprint(seed), func(t *testing.T) { short += newHarmNode(t, backend, seed, table).story() }); t.Failed() {
						return
					}
				}
				if short < draws/20 {
					t.Errorf("rules waited in %d of %d draws only", short, draws)
				}
			})
		}
	}
}

func seeds(n int) (list []uint64) {
	for i := range n {
		list = append(list, uint64(i))
	}
	return list
}

// acceptEmpty learns chains that were emptied alone, as canaryd does after two seconds: emptying
// them is their owner's decision.
func (h *harmNode) acceptEmpty() {
	section := h.job.Generation[v4.Table(h.table)]
	_, h.job.Quarantine = h.job.Quarantine.Supplement(v4, h.table, section, h.replayer.Protection.Extract(h.seen(), canary.IsMark), nil)
	id := v4.Table(h.table)
	left := without(section, h.job.Quarantine[id])
	section.Chains = slices.Clone(section.Chains)
	emptied := map[string]bool{}
	for i, c := range section.Chains {
		if standing := h.seen().Chain(c.Name); standing != nil && len(standing.Rules) == 0 && len(left.Chains[i].Rules) > 0 {
			section.Chains[i].Rules, emptied[c.Name] = nil, true
		}
	}
	h.job.Generation = h.job.Generation.With(id, section)
	still := slices.DeleteFunc(slices.Clone(h.job.Quarantine[id]), func(q QuarantinedRule) bool { return emptied[q.Chain] })
	h.job.Quarantine = h.job.Quarantine.With(id, still)
}

// story flushes, heals, and puts the sets back. It returns 1 if rules waited.
func (h *harmNode) story() (waited int) {
	h.t.Helper()
	full := h.content(v4)
	for round := range 1 + h.IntN(2) {
		how := h.flush()
		h.destroySets(h.IntN(64))
		h.flushed = append(h.flushed, h.fates(h.seen()))
		h.t.Cleanup(func() {
			if h.t.Failed() {
				h.t.Logf("flushed by %s; before\n%s\nnow\n%s\nin quarantine %v", how, full, h.content(v4), h.job.Quarantine)
			}
		})
		result := h.heal()
		h.takeHeld(result)
		h.unharmed(fmt.Sprint("after replay ", round))
		for _, held := range h.job.Quarantine {
			if slices.ContainsFunc(held, func(q QuarantinedRule) bool { return q.Waits }) {
				waited = 1
			}
		}
		// A chain that was emptied alone may count as lost only when a jump to its target waits.
		for look := 1; ; look++ {
			again := h.heal()
			h.takeHeld(again)
			if again[v4].Outcome == Skipped {
				break
			}
			h.unharmed(fmt.Sprintf("look %d after replay %d", look, round))
			if look == 4 {
				h.t.Errorf("look %d finds %v, %v", look, verdicts(again[v4]), again[v4].Err)
				break
			}
		}
	}
	for _, i := range h.Perm(6) {
		h.Sets().Put(harmSet(i))
		result, err := h.replayer.Readmit(h.t.Context(), h.job)
		must(h.t, err)
		h.take(result)
		h.takeHeld(result)
		h.unharmed(fmt.Sprintf("with set s%d", i))
	}
	for range 2 { // a rule that leads to an emptied chain may have waited, too
		h.acceptEmpty()
		result, err := h.replayer.Readmit(h.t.Context(), h.job)
		must(h.t, err)
		h.take(result)
		h.takeHeld(result)
	}
	missingForeign := slices.ContainsFunc(h.job.Quarantine[v4.Table(h.table)], func(q QuarantinedRule) bool { return q.MissingChain != "" })
	if h.job.Quarantine.Count() > 0 && !missingForeign {
		h.t.Errorf("with all sets there are still in quarantine %v", h.job.Quarantine)
	}
	return waited
}
