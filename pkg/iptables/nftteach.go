package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A script may hold rules that have only bytes next to rules that have only a text: those of a
// generation from disk, which were never read on this node, and those that name an ipset. No
// program takes both. So iptables-restore writes the latter to a chain that nothing jumps to, and
// their bytes are read there. Then one transaction writes everything. As long as that chain
// stands, the numbers of ipsets in those bytes mean the same.

const (
	// TrialChain is a chain to which rules are written on trial, and TrialTarget is where those
	// rules jump whose own target does not exist. No packet reaches either. Nothing protects them,
	// because no glob matches a name that ends in -CANARY.
	TrialChain  = "KUBE-CANARYD-TRIAL-CANARY"
	TrialTarget = "KUBE-CANARYD-TRIAL-TO-CANARY"
)

// taught are the bytes of rules that have only a text, by their Key.
type taught map[rules.TableID]map[rules.Key]nft.Rule

// teach encodes what is due once more, where a script mixes rules that have only bytes with rules
// that have only a text. It returns the genid that the batch goes with, and what takes the trial
// chains away again. The error is nft.ErrStale.
func (s *genidSession) teach(ctx context.Context, batch *directBatch, due Payload, genid uint64, anyway bool) (*directBatch, uint64, func(), error) {
	known, trials, commits := taught{}, Payload{}, uint64(0)
	var failed error
	for _, family := range slices.Sorted(maps.Keys(batch.left())) {
		for i := range batch.result.left[family] {
			script := &batch.result.left[family][i]
			if script.textless() == nil || failed != nil {
				continue
			}
			trials[family] = append(trials[family], Script{Table: script.Table, Steps: []Step{
				{Verb: Flush, Chain: TrialChain}, {Verb: Drop, Chain: TrialChain}, {Verb: Drop, Chain: TrialTarget},
			}})
			commits++
			known[family.Table(script.Table)], failed = s.kernel.bytesOf(ctx, family, script)
		}
	}
	end := func() { s.endTrials(ctx, trials) }
	if len(trials) == 0 {
		return batch, genid, func() {}, nil
	}
	if failed != nil {
		for family := range trials {
			batch.result.detour[family] = oneLine([]error{batch.result.detour[family], failed})
		}
	}
	now, err := s.kernel.reader.digest(context.WithoutCancel(ctx), 0)
	if moved := uint32(now) - uint32(genid); err != nil || uint64(moved) > commits && !anyway { // the counter wraps
		return batch, genid, end, nft.ErrStale
	} else {
		s.moved(moved)
	}
	if failed == nil {
		batch = s.kernel.encodeWith(due, known)
	}
	return batch, now, end, nil
}

// left returns the scripts that the batch does not have.
func (b *directBatch) left() Payload {
	if b == nil {
		return nil
	}
	return b.result.left
}

// endTrials deletes trial chains, as far as they stand.
func (s *genidSession) endTrials(ctx context.Context, trials Payload) {
	for family, scripts := range trials {
		for _, script := range scripts {
			before, err := s.kernel.reader.digest(context.WithoutCancel(ctx), family)
			if err != nil {
				continue
			}
			one := Payload{family: {script}}
			if r := s.kernel.sendDirectly(s.kernel.encode(one), one, uint32(before), nil); r.err == nil && len(r.left) == 0 {
				s.moved(r.moved)
				continue
			}
			// Another process commits all the time: what moved by whom is not known any more.
			clear(s.noted)
			s.kernel.sendDirectly(s.kernel.encode(one), one, nft.NoGuard, nil)
		}
	}
}

// bytesOf has iptables write those of the script's rules to the trial chain of which no bytes can
// be written, and returns their bytes.
func (k *Kernel) bytesOf(ctx context.Context, family rules.Family, script *Script) (map[rules.Key]nft.Rule, error) {
	trial := Script{Table: script.Table, Declare: []string{TrialChain, TrialTarget}}
	var asked []rules.Rule
	met, declared := map[rules.Key]bool{}, map[string]bool{}
	for _, name := range script.Declare {
		declared[name] = true
	}
	for i := range script.Steps {
		r := script.Steps[i].Rule
		if r == (rules.Rule{}) || met[r.Key()] || k.hasBytes(family, r) {
			continue
		}
		met[r.Key()] = true
		asked = append(asked, r)
		if declared[r.Target] {
			r = r.WithTarget(TrialTarget)
		}
		trial.Steps = append(trial.Steps, Step{Verb: Append, Chain: TrialChain, Rule: r})
	}
	if err := k.restore(ctx, family, Scripts{trial}); err != nil {
		return nil, err
	}
	learned, n := make(map[rules.Key]nft.Rule, len(asked)), 0
	err := k.directConn().EachRule(family, script.Table, TrialChain, func(m nft.RuleMessage) error {
		if n == len(asked) {
			return errors.New("the trial chain holds more rules than were written to it")
		}
		r := m.Rule.Clone()
		if target := asked[n].Target; declared[target] {
			r.Expressions = retargeted(r.Expressions, target, jumpPath...)
		}
		learned[asked[n].Key()] = r
		n++
		return nil
	})
	if err == nil && n < len(asked) {
		err = fmt.Errorf("the trial chain holds %d of the %d rules that were written to it", n, len(asked))
	}
	return learned, err
}

// hasBytes reports whether bytes of the rule are known that make it again.
func (k *Kernel) hasBytes(family rules.Family, r rules.Rule) bool {
	raw, known := k.source.raw(family, r, nil)
	if !known {
		return false
	}
	_, err := needsOf(raw, family)
	return err == nil
}

// jumpPath is where a rule's expressions name the chain that it leads to.
var jumpPath = []uint16{unix.NFTA_LIST_ELEM, unix.NFTA_EXPR_DATA, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN}

// retargeted returns attributes with the trial's target, which stands at that path, replaced by a
// chain.
func retargeted(list []byte, chain string, path ...uint16) []byte {
	var out []byte
	for rest := list; len(rest) > 0; {
		kind, value, after, err := nft.NextAttr(rest)
		switch {
		case err != nil:
			return list
		case kind == path[0] && len(path) > 1:
			value = retargeted(value, chain, path[1:]...)
		case kind == path[0] && nft.String(value) == TrialTarget:
			value = append([]byte(chain), 0)
		}
		out = nft.AppendAttr(out, binary.NativeEndian.Uint16(rest[2:]), value, 0)
		rest = after
	}
	return out
}
