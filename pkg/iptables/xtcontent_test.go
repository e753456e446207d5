package iptables

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A script with a rule that has no text is written again and again. No look at
// the table may show a part of the script. Each write makes and deletes one
// chain, which no packet reaches.
func TestAReplacedTableIsNeverSeenInPart(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		odd, plain := lineBreak(t, k, family)
		iptablesCommand(t, Legacy, family, "-A FORWARD -j MINE")
		iptablesCommand(t, Legacy, family, "-A FORWARD -p udp -j ACCEPT")
		script := replayOf(rules.Filter, "MINE", []rules.Rule{odd, plain})
		script.Steps = append(script.Steps,
			Step{Verb: Delete, Chain: "FORWARD", Index: 1},
			Step{Verb: Insert, Chain: "FORWARD", Index: 1, Rule: rules.Rule{Spec: "-j MINE", Target: "MINE"}})
		observer, err := openXT(family)
		if err != nil {
			t.Fatal(err)
		}
		defer observer.close()
		look := func() (sum uint64, staged bool) {
			err := observer.entries(rules.Filter, func(info xtInfo, data []byte) error {
				content, err := takeApart(family, info, data)
				if err != nil {
					return err
				}
				staged = content.remove(TextChain) != nil
				if content.leads(TextChain) {
					t.Error("a rule of another chain jumps to the chain of texts")
				}
				sum = content.sum()
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			return sum, staged
		}
		before, _ := look()
		var over atomic.Bool
		var looks atomic.Int64
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for !over.Load() {
				sum, staged := look()
				looks.Add(1)
				if sum != before {
					t.Error("the table is seen in part")
					break
				}
				if staged {
					t.Error("rules with known bytes are staged")
				}
			}
		}()
		s := begin(t, k)
		for writes := 0; writes < 40 || looks.Load() == 0; writes++ {
			mustRead(t, s, family)
			if err := s.Restore(t.Context(), Payload{family: {script}})[family].Err; err != nil {
				t.Error(err)
				break
			}
		}
		over.Store(true)
		<-ended
		if now, staged := look(); now != before || staged {
			t.Errorf("the table is another, or chain %s is left: %t", TextChain, staged)
		}
	})
}

// iptables ends every chain with a verdict. The last entry of another chain may
// be a rule, and a change of the chain would take it for the end.
func TestAChainWithoutAVerdictIsRefused(t *testing.T) {
	info, data := sampleTable(rules.IPv4)
	content, err := takeApart(rules.IPv4, info, data)
	if err != nil {
		t.Fatal(err)
	}
	for _, chain := range content.chains {
		e := content.entry(chain.tail)
		was := e.verdict()
		binary.NativeEndian.PutUint32(e.target[xtExtDataAt:], 0)
		if _, err := takeApart(rules.IPv4, info, data); !errors.Is(err, errWalk) {
			t.Errorf("chain %s: got %v, want %v", chain.name, err, errWalk)
		}
		binary.NativeEndian.PutUint32(e.target[xtExtDataAt:], uint32(int32(was)))
	}
}

// FuzzTakeApart: any bytes are taken for a table or for a rule. Nothing may
// panic, and assembling a parsed table must yield the same content.
func FuzzTakeApart(f *testing.F) {
	for _, family := range rules.Families() {
		info, data := sampleTable(family)
		f.Add(family == rules.IPv6, info.validHooks, info.hookEntry[1], info.hookEntry[3], info.underflow[1], data, data[:256])
	}
	f.Fuzz(func(t *testing.T, v6 bool, hooks, first, second, last uint32, data, entry []byte) {
		family := rules.IPv4
		if v6 {
			family = rules.IPv6
		}
		raw, _ := olderEntry(family, entry, "X")
		piece, _ := pieceOf(family, raw, nil)
		if again, err := pieceOf(family, nft.Rule{Expressions: entry}, nil); err == nil {
			piece = again
		}
		join := func(content *xtContent) (xtInfo, []byte, error) {
			out := &xtPages{}
			defer out.free()
			info, _, err := content.join(out, nil)
			return info, slices.Clone(out.mem[:out.used]), err
		}
		info := xtInfo{validHooks: hooks, hookEntry: [5]uint32{0, first, 0, second, 0}, underflow: [5]uint32{0, last, 0, second, 0}}
		content, err := takeApart(family, info, slices.Clone(data))
		if err != nil {
			return
		}
		sum := content.sum()
		now, entries, err := join(content)
		if err != nil {
			t.Fatalf("what was taken apart cannot be put together: %v", err)
		}
		again, err := takeApart(family, now, entries)
		if err != nil || again.sum() != sum {
			t.Errorf("put together it says something else: %v", err)
		}
		if piece.bytes == nil || len(content.chains) == 0 {
			return
		}
		step := Step{Verb: Insert, Chain: content.chains[0].name}
		if err := content.apply(&step, piece); err != nil {
			t.Fatal(err)
		}
		if _, entries, err := join(content); err == nil && len(entries) != len(data)+len(piece.bytes) {
			t.Errorf("%d bytes and %d more are %d", len(data), len(piece.bytes), len(entries))
		}
	})
}
