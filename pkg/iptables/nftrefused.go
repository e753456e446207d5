package iptables

import (
	"bytes"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// blameless are the kernel's errors whose cause is not the refused rule. The kernel lacks
// memory, or the chains of the whole table make a loop or are nested too deeply.
var blameless = []error{unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EAGAIN, unix.ELOOP, unix.EMLINK}

// named returns the refusal of a guarded transaction with the rule that the kernel complained
// about first. It is nil if the refused message writes no rule, or a mark. The guard was right,
// so the cause is nothing that another process wrote to nf_tables.
//
// named encodes the payload once more to find the rule. The result counts only if the genid and
// the message are still the same. A table that can no longer be encoded would shift the
// messages' numbers. Later complaints name no rule. If the kernel validates the whole, it
// continues with the refused rule in the table and complains about all later ones.
func (k *Kernel) named(b *directBatch, payload Payload, genid uint32, refused *nft.RefusedError) *RestoreError {
	if slices.ContainsFunc(blameless, func(e error) bool { return errors.Is(refused, e) }) {
		return nil
	}
	again := k.encodeSeeking(payload, b.writer.taught, refused.Message)
	rule := again.writer.found
	if now, err := again.writer.conn.Genid(); rule == nil || err != nil || now != genid {
		return nil
	}
	if !bytes.Equal(again.writer.batch.Message(refused.Message), b.writer.batch.Message(refused.Message)) {
		return nil
	}
	if _, mark := cutMark(rule.Rule.Spec); mark {
		return nil
	}
	reason := ReasonOther
	if errors.Is(refused, unix.ENOENT) && len(rule.Rule.Needs().Sets) > 0 {
		reason = ReasonMissingSet
	}
	_, opaque := rule.Rule.Opaque()
	return &RestoreError{Reason: reason, Program: "nf_tables", Stderr: refused.Error(), Rule: rule, Textless: opaque}
}

// seek notes in p.found the n-th new rule of the plan, in the order of writeNewRules, which is
// also that of the messages. write calls it for named.
func (p *tablePlan) seek(n int) {
	for _, c := range p.order {
		for i := range c.rules {
			if !c.rules[i].isNew() {
				continue
			}
			if n--; n == 0 {
				p.found = &RefusedRule{p.family.Table(p.table), c.name, *c.rules[i].rule}
			}
		}
	}
}
