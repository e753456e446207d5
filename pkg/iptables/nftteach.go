package iptables

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd has only the texts of declared rules, and of a generation that another node or version
// wrote. iptables-restore writes such rules to a chain that nothing jumps to, and canaryd reads
// their bytes there. Then one transaction writes everything, and from now on canaryd reads these
// bytes as that text. No guess pairs the two. While that chain exists, the numbers of ipsets in
// those bytes keep their meaning.

const (
	// TextChain is the chain for texts whose bytes canaryd wants to read. TrialChain is the
	// chain for rules on trial. TrialTarget replaces a missing target of rules in both. No
	// packet reaches any of them. Nothing protects them, because no glob matches a name that
	// ends in -CANARY.
	TextChain   = "KUBE-CANARYD-TEXT-CANARY"
	TrialChain  = "KUBE-CANARYD-TRIAL-CANARY"
	TrialTarget = "KUBE-CANARYD-TRIAL-TO-CANARY"
)

// taught are the bytes of rules that have only a text, by table and Key.
type taught map[rules.TableID]map[rules.Key]taughtRule

// A taughtRule is a text and the bytes that iptables-restore made from it.
type taughtRule struct {
	rule rules.Rule
	raw  nft.Rule
}

// teach encodes the payload once more if a script has rules with a text and no bytes. A script
// that is written as text needs the bytes, too: else it could not be proved, and would be
// written again and again. teach returns the batch, its genid, and a function that removes the
// chains of texts. The error is nft.ErrStale, too, if rules in force turned out to have these
// texts: the script would write them a second time.
func (s *genidSession) teach(ctx context.Context, batch *directBatch, due Payload, genid uint64, anyway bool) (*directBatch, uint64, func(), error) {
	known, trials, commits := taught{}, Payload{}, uint64(0)
	revealed := s.kernel.source.revealed()
	var failed error
	for _, family := range slices.Sorted(maps.Keys(batch.left())) {
		for i := range batch.result.left[family] {
			script := &batch.result.left[family][i]
			if failed != nil || !s.kernel.lacksBytes(family, script) {
				continue
			}
			trials[family] = append(trials[family], Script{Table: script.Table, Steps: []Step{
				{Verb: Flush, Chain: TextChain}, {Verb: Drop, Chain: TextChain}, {Verb: Drop, Chain: TrialTarget},
			}})
			commits++
			bytes, err := s.kernel.bytesOf(ctx, family, script)
			if err == nil {
				known[family.Table(script.Table)] = bytes
			} else if !s.kernel.goesAsText(script) { // else the write has the error
				failed = err
			}
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
	for id, list := range known { // without anyway, the genid shows that all are canaryd's
		for _, t := range list {
			if named, err := nameSets(t.raw, s.kernel.sets.name); err == nil {
				err = s.kernel.source.name(id.Family, named, t.rule)
				failed = cmp.Or(failed, err)
			}
		}
	}
	if !anyway && s.kernel.source.revealed() != revealed {
		return batch, now, end, nft.ErrStale
	}
	if failed == nil {
		batch = s.kernel.encodeWith(due, known)
	}
	return batch, now, end, nil
}

// left returns the scripts that are not in the batch, which teach then looks at; nil without a
// direct path.
func (b *directBatch) left() Payload {
	if b == nil {
		return nil
	}
	return b.result.left
}

// byMarks returns the guard for a batch of scripts that are ByMarks: none, because it deletes the
// marks by their handles. If it could not find one, the marks are gone. Without a batch the
// scripts are text, and genid stays their guard.
func (b *directBatch) byMarks(genid uint64) (uint64, error) {
	if b == nil {
		return genid, nil
	}
	if len(b.result.detour) > 0 {
		return genid, nft.ErrStale
	}
	return nft.NoGuard, nil
}

// goesAsText reports whether a script must be written as text, even if its bytes are known. The
// chains of texts are deleted directly.
func (k *Kernel) goesAsText(script *Script) bool {
	return script.AsText || k.cfg.Replay == ReplayText && script.textless() == nil && !script.removesTexts()
}

// removesTexts reports whether the script only deletes chains of texts.
func (s *Script) removesTexts() bool {
	others := func(s Step) bool { return s.Chain != TextChain && s.Chain != TrialTarget }
	return len(s.Declare) == 0 && len(s.Steps) > 0 && !slices.ContainsFunc(s.Steps, others)
}

// lacksBytes reports whether a rule of the script has no writable bytes. Then teach tries the
// texts of the script.
func (k *Kernel) lacksBytes(family rules.Family, script *Script) bool {
	var room []byte
	return slices.ContainsFunc(script.Steps, func(s Step) bool { return s.Rule != (rules.Rule{}) && !k.hasBytes(family, s.Rule, &room) })
}

// endTrials deletes the chains of texts that exist, after the payload was written: until then
// they keep the numbers of ipsets valid. trials has the scripts that delete them, by family.
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
			// Another process commits all the time, and canaryd no longer knows the share of
			// each.
			clear(s.noted)
			s.kernel.sendDirectly(s.kernel.encode(one), one, nft.NoGuard, nil)
		}
	}
}

// bytesOf has iptables-restore write the script's rules without bytes to the chain of texts,
// and returns their bytes by Key. teach calls it. A target that the script itself declares is
// replaced by TrialTarget meanwhile.
func (k *Kernel) bytesOf(ctx context.Context, family rules.Family, script *Script) (map[rules.Key]taughtRule, error) {
	trial := Script{Table: script.Table, Declare: []string{TextChain, TrialTarget}}
	var asked []rules.Rule
	var room []byte
	met, declared := map[rules.Key]bool{}, map[string]bool{}
	for _, name := range script.Declare {
		declared[name] = true
	}
	for i := range script.Steps {
		r := script.Steps[i].Rule
		if r == (rules.Rule{}) || met[r.Key()] || k.hasBytes(family, r, &room) {
			continue
		}
		met[r.Key()] = true
		asked = append(asked, r)
		if declared[r.Target] {
			r = r.WithTarget(TrialTarget)
		}
		trial.Steps = append(trial.Steps, Step{Verb: Append, Chain: TextChain, Rule: r})
	}
	if err := k.restore(ctx, family, Scripts{trial}); err != nil {
		return nil, err
	}
	learned, n := make(map[rules.Key]taughtRule, len(asked)), 0
	err := k.directConn().EachRule(family, script.Table, TextChain, func(m nft.RuleMessage) error {
		if n == len(asked) {
			return fmt.Errorf("chain %s holds more rules than were written to it", TextChain)
		}
		r := m.Rule.Clone()
		if target := asked[n].Target; declared[target] {
			r.Expressions = retargeted(r.Expressions, target, jumpPath...)
		}
		learned[asked[n].Key()] = taughtRule{asked[n], r}
		n++
		return nil
	})
	if err == nil && n < len(asked) {
		err = fmt.Errorf("chain %s holds %d of the %d rules that were written to it", TextChain, n, len(asked))
	}
	return learned, err
}

// hasBytes reports whether bytes are known that make the rule again. A rule without them needs
// a trial of its text (lacksBytes, bytesOf, stage). It uses room, which is overwritten.
func (k *Kernel) hasBytes(family rules.Family, r rules.Rule, room *[]byte) bool {
	raw, known := k.source.raw(family, r, *room)
	if !known {
		return false
	}
	*room = raw.Expressions
	_, err := needsOf(raw, family)
	return err == nil
}

// jumpPath is the path to the name of the target chain in a rule's expressions.
var jumpPath = []uint16{unix.NFTA_LIST_ELEM, unix.NFTA_EXPR_DATA, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN}

// retargeted returns attributes with the trial's target at that path replaced by a chain.
// bytesOf wrote the rule with TrialTarget, because the chain may not exist yet. Bytes that
// cannot be parsed stay unchanged.
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
