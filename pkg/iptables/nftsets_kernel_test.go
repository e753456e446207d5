package iptables

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// oddSetNames are names that the kernel accepts and that iptables prints
// unchanged.
var oddSetNames = []string{"a b", `q"q`, "l\nl", "-h", `b\s`, strings.Repeat("x", 31), "a src -m comment --comment"}

// createSet makes an ipset of addresses.
func createSet(t *testing.T, family rules.Family, name string, more ...string) {
	t.Helper()
	inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
	kind := append([]string{"hash:ip", "family", inet, "timeout", "0"}, more...)
	if strings.HasPrefix(name, "-") { // ipset takes it for an option
		nstest.Command(t, "ipset", append([]string{"create", "made"}, kind...)...)
		renameSet(t, "made", name)
		return
	}
	nstest.Command(t, "ipset", append([]string{"create", name}, kind...)...)
}

// renameSet renames a set by IPSET_CMD_RENAME, with any name.
func renameSet(t *testing.T, from, to string) {
	t.Helper()
	const rename, second = 5, 3 // IPSET_CMD_RENAME, IPSET_ATTR_SETNAME2
	var s setNumbers
	defer s.close()
	data := nft.AppendAttr(setRequest(), setAttrName, from, 1)
	if _, err := s.execute(rename, 0x5, nft.AppendAttr(data, second, to, 1)); err != nil { // NLM_F_REQUEST|NLM_F_ACK
		t.Fatal(err)
	}
}

// destroySets removes all sets.
func destroySets(t *testing.T) {
	t.Helper()
	nstest.Command(t, "ipset", "destroy")
}

// setRules are rules of a chain MINE that name ipsets in each place that iptables
// knows.
func setRules(names ...string) [][]string {
	var all [][]string
	for _, name := range names {
		all = append(all,
			[]string{"-m", "set", "--match-set", name, "src", "-j", "DROP"},
			[]string{"-p", "tcp", "-m", "set", "!", "--match-set", name, "dst", "--return-nomatch", "--packets-gt", "3", "-m", "set", "--match-set", "second", "src,dst", "-j", "RETURN"},
			[]string{"-j", "SET", "--add-set", name, "src", "--exist", "--timeout", "30"},
			[]string{"-j", "SET", "--del-set", name, "dst"},
			[]string{"-j", "SET", "--map-set", name, "src", "--map-mark"})
	}
	return all
}

// addSetRules makes the chain MINE, in which rules with ipsets alternate with
// other rules.
func addSetRules(t *testing.T, family rules.Family, names ...string) int {
	t.Helper()
	iptablesCommand(t, NFT, family, "-t mangle -N MINE")
	added := 0
	for n, args := range setRules(names...) {
		if _, err := tryTool(t, "", program(NFT, family, ""), slices.Concat([]string{"-w", "5", "-t", "mangle", "-A", "MINE"}, args)...); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		iptablesCommand(t, NFT, family, fmt.Sprintf("-t mangle -A MINE -p tcp --dport %d -j ACCEPT", n+1))
		added++
	}
	return added
}

// wantMine fails unless the chain MINE of mangle holds these rules, and was written directly.
func wantMine(t *testing.T, k *Kernel, family rules.Family, w Written, want []rules.Rule) {
	t.Helper()
	if w.Detour != nil {
		t.Errorf("not directly: %v", w.Detour)
	}
	if got := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE"); !slices.Equal(got, want) {
		t.Errorf("MINE (-want +got):\n%s", cmp.Diff(want, got))
	}
}

// Rules that name ipsets come back by their bytes in the one transaction, for any
// names of sets. If the sets were made again with other numbers, the rules name
// the sets of the same names.
func TestRulesThatNameIpsetsComeBack(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		names := append([]string{"plain"}, oddSetNames...)
		for _, name := range append(slices.Clone(names), "second") {
			createSet(t, family, name, "counters")
		}
		n := addSetRules(t, family, names...)
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		conn := dialTest(t)
		before, want := chainBytes(t, conn, family, "mangle", "MINE"), mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE")
		if len(want) != 2*n {
			t.Fatalf("%d rules are read of %d", len(want), 2*n)
		}
		s := begin(t, k)
		for i, r := range want {
			if _, opaque := r.Opaque(); !s.Writes(r) || opaque && i%2 == 1 || opaque != r.HasBytes() {
				t.Errorf("rule %d: opaque %t, written %t: %q", i, opaque, s.Writes(r), r.Label())
			}
		}
		iptablesCommand(t, NFT, family, "-t mangle -F MINE")
		wantMine(t, k, family, restoreAll(t, k, family, replayOf(rules.Mangle, "MINE", want)), want)
		if diff := cmp.Diff(before, chainBytes(t, conn, family, "mangle", "MINE")); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
		iptablesCommand(t, NFT, family, "-t mangle -F MINE")
		destroySets(t)
		createSet(t, family, "another", "counters") // gets the number of the first
		for _, name := range append([]string{"second"}, names...) {
			createSet(t, family, name, "counters")
		}
		wantMine(t, k, family, restoreAll(t, k, family, replayOf(rules.Mangle, "MINE", want)), want)
		if diff := cmp.Diff(before, chainBytes(t, conn, family, "mangle", "MINE")); diff == "" {
			t.Error("the sets have their old numbers")
		}
	})
}

// A process that never read the rules, as after a restart, writes rules that have
// only bytes. It uses the present numbers of their sets.
func TestStoredRulesNameTheIpsetsOfNow(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		names := append([]string{"second"}, oddSetNames...)
		for _, name := range names {
			createSet(t, family, name, "counters")
		}
		addSetRules(t, family, oddSetNames...)
		first := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		var want []rules.Rule
		for _, r := range mustRead(t, first, family).Tables[rules.Mangle].Rules("MINE") {
			again, err := rules.ParseRule(r.Spec) // as if read from disk
			if err != nil || again != r {
				t.Fatalf("%q is read as %q: %v", r.Spec, again.Spec, err)
			}
			if again.HasBytes() {
				want = append(want, again)
			}
		}
		iptablesCommand(t, NFT, family, "-t mangle -F MINE")
		destroySets(t)
		slices.Reverse(names)
		for _, name := range names {
			createSet(t, family, name, "counters")
		}
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		wantMine(t, k, family, restoreAll(t, k, family, replayOf(rules.Mangle, "MINE", want)), want)
	})
}

// The name of a rule's set finds the rule for a deletion. Then the rule is
// inserted before others.
func TestARuleThatNamesAnIpsetIsDeletedByItsName(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		for _, name := range []string{"a b", "c d", "second"} {
			createSet(t, family, name, "counters")
		}
		addSetRules(t, family, "a b", "c d")
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		all := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE")
		w := restoreAll(t, k, family, Script{Table: rules.Mangle, Steps: []Step{
			{Verb: Delete, Chain: "MINE", Rule: all[10]}, {Verb: Insert, Chain: "MINE", Rule: all[10], Index: 1},
		}})
		wantMine(t, k, family, w, slices.Concat(all[10:11], all[:10], all[11:]))
	})
}

// "ipset swap" exchanges the contents of two sets, and each number keeps its
// name. So a rule that names a set does not change, and is restored unchanged.
func TestASwapLeavesTheNamesOfNumbers(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		for _, name := range []string{"a b", "plain", "second"} {
			createSet(t, family, name, "counters")
		}
		addSetRules(t, family, "a b", "plain")
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		want := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE")
		nstest.Command(t, "ipset", "swap", "a b", "plain")
		iptablesCommand(t, NFT, family, "-t mangle -A MINE -p sctp -j ACCEPT") // MINE is read again
		if got := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE"); !slices.Equal(got[:len(want)], want) {
			t.Errorf("after the swap MINE is (-want +got):\n%s", cmp.Diff(want, got[:len(want)]))
		}
		iptablesCommand(t, NFT, family, "-t mangle -F MINE")
		nstest.Command(t, "ipset", "swap", "a b", "plain")
		wantMine(t, k, family, restoreAll(t, k, family, replayOf(rules.Mangle, "MINE", want)), want)
	})
}

// A rule that has only bytes is not written while its set is missing, and the
// refusal names the reason. No part of its script is written.
func TestARuleWhoseIpsetIsMissingIsRefused(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		createSet(t, family, "a b", "counters")
		createSet(t, family, "second", "counters")
		addSetRules(t, family, "a b")
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		want := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE")
		iptablesCommand(t, NFT, family, "-t mangle -F MINE")
		destroySets(t)
		s := begin(t, k)
		mustRead(t, s, family)
		w := s.Restore(t.Context(), Payload{family: {replayOf(rules.Mangle, "MINE", want)}})[family]
		var refused *RestoreError
		if !errors.As(w.Err, &refused) || refused.Reason != ReasonMissingSet || !strings.Contains(refused.Stderr, `"a b"`) {
			t.Errorf("without the set: %v", w.Err)
		}
		if left := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE"); len(left) > 0 {
			t.Errorf("%d rules are written", len(left))
		}
	})
}

// A hookedIndex calls then after each look-up of a name.
type hookedIndex struct {
	setIndex
	then func()
}

func (h hookedIndex) number(name string) (uint16, error) {
	n, err := h.setIndex.number(name)
	h.then()
	return n, err
}

// A set is destroyed and made again between the look-up and the commit, and
// another one gets its number. The kernel accepts the rule, and the next read
// shows which set the rule names. The next write names the right set. A batch
// that was encoded before is encoded again.
func TestAnIpsetMadeAgainDuringTheWriteIsSeen(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		createSet(t, family, "a b")
		iptablesCommand(t, NFT, family, "-t mangle -N MINE")
		if _, err := tryTool(t, "", program(NFT, family, ""), "-t", "mangle", "-A", "MINE", "-m", "set", "--match-set", "a b", "src", "-j", "DROP"); err != nil {
			t.Fatal(err)
		}
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		want := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE")
		iptablesCommand(t, NFT, family, "-t mangle -F MINE")
		payload := Payload{family: {replayOf(rules.Mangle, "MINE", want)}}
		remake := func() {
			destroySets(t)
			createSet(t, family, "other")
			createSet(t, family, "a b")
		}

		s := begin(t, k)
		mustRead(t, s, family)
		real, asked := k.sets, 0
		// The encoding makes the first look-up, and the check before the commit
		// the second.
		k.sets = hookedIndex{real, func() {
			if asked++; asked == 2 {
				remake()
			}
		}}
		w := s.Restore(t.Context(), payload)[family]
		k.sets = real
		if w.Err != nil || w.Raced {
			t.Fatalf("the write: %+v", w)
		}
		got := mustRead(t, s, family)
		mine := got.Tables[rules.Mangle].Rules("MINE")
		if got.Moved || len(mine) != 1 || mine[0].Equal(want[0]) || !slices.Equal(mine[0].Needs().Sets, []string{"other"}) {
			t.Fatalf("after a write that met another set, moved %t: %v", got.Moved, mine)
		}

		w = s.Restore(t.Context(), payload)[family]
		wantMine(t, k, family, w, want)

		iptablesCommand(t, NFT, family, "-t mangle -F MINE")
		early := k.encode(payload)
		remake()
		genid, err := k.directConn().Genid()
		if direct := k.sendDirectly(early, payload, genid, nil); err != nil || direct.err != nil || len(direct.left) > 0 {
			t.Errorf("%v: %+v", err, direct)
		}
		wantMine(t, k, family, Written{}, want)
	})
}

// A set is destroyed between the look-up of its number and the commit, and the
// kernel refuses the rule. This proves nothing about any rule of the transaction:
// the write is stale.
func TestAnIpsetThatGoesDuringTheWriteBlamesNoRule(t *testing.T) {
	for _, made := range []bool{false, true} {
		t.Run(fmt.Sprintf("made again %t", made), func(t *testing.T) {
			onNFT(t, func(t *testing.T, family rules.Family) {
				nstest.NeedProgram(t, "ipset")
				createSet(t, family, "first")
				createSet(t, family, "a b")
				for _, line := range []string{"-t mangle -N MINE", "-N MINE", "-A MINE -p tcp", "-A MINE -p udp"} {
					iptablesCommand(t, NFT, family, line)
				}
				if _, err := tryTool(t, "", program(NFT, family, ""), "-t", "mangle", "-A", "MINE", "-m", "set", "--match-set", "a b", "src", "-j", "DROP"); err != nil {
					t.Fatal(err)
				}
				k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
				want := mustRead(t, k, family)
				iptablesCommand(t, NFT, family, "-t mangle -F MINE")
				iptablesCommand(t, NFT, family, "-F MINE")
				payload := Payload{family: {
					replayOf(rules.Mangle, "MINE", want.Tables[rules.Mangle].Rules("MINE")),
					replayOf(rules.Filter, "MINE", want.Tables[rules.Filter].Rules("MINE")),
				}}
				s := begin(t, k)
				mustRead(t, s, family)
				real, asked := k.sets, 0
				k.sets = hookedIndex{real, func() {
					if asked++; asked != 2 { // the check before the commit
						return
					}
					destroySets(t)
					if made { // with the number of the first set
						createSet(t, family, "a b")
					}
				}}
				w := s.Restore(t.Context(), payload)[family]
				k.sets = real
				if !errors.Is(w.Err, nft.ErrStale) {
					t.Fatalf("the write: %+v, want %v", w, nft.ErrStale)
				}
				if !made {
					createSet(t, family, "a b")
				}
				mustRead(t, s, family)
				w = s.Restore(t.Context(), payload)[family]
				wantMine(t, k, family, w, want.Tables[rules.Mangle].Rules("MINE"))
			})
		})
	}
}

// canaryd executes no iptables for rules that name ipsets, nor for bytecode.
func TestRulesThatNameIpsetsExecuteNothing(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		for _, name := range []string{"a b", "plain", "second"} {
			createSet(t, family, name, "counters")
		}
		addSetRules(t, family, "plain", "a b")
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		calls := countPrograms(t, k, family)
		want := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE")
		iptablesCommand(t, NFT, family, "-t mangle -D MINE 2")
		got := mustRead(t, k, family).Tables[rules.Mangle].Rules("MINE")
		if diff := cmp.Diff(slices.Delete(slices.Clone(want), 1, 2), got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if n := calls(); n != 0 {
			t.Errorf("%d programs were executed", n)
		}
	})
}

// Bytecode of the match bpf contains no number of the kernel's. It comes back
// byte for byte, even if the writing process read only its bytes.
func TestBytecodeComesBackByteForByte(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		conn := dialTest(t)
		iptablesCommand(t, NFT, family, "-N MINE")
		for _, code := range []string{"4,48 0 0 9,21 0 1 6,6 0 0 1,6 0 0 0", "1,6 0 0 1"} {
			if _, err := tryTool(t, "", program(NFT, family, ""), "-A", "MINE", "-m", "bpf", "--bytecode", code, "-j", "ACCEPT"); err != nil {
				nstest.Need(t, "the match bpf", err)
			}
		}
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		before, want := chainBytes(t, conn, family, "filter", "MINE"), mustRead(t, k, family).Tables[rules.Filter].Rules("MINE")
		iptablesCommand(t, NFT, family, "-F MINE")
		if w := restoreAll(t, k, family, replayOf(rules.Filter, "MINE", want)); w.Detour != nil {
			t.Errorf("not directly: %v", w.Detour)
		}
		if diff := cmp.Diff(before, chainBytes(t, conn, family, "filter", "MINE")); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
	})
}
