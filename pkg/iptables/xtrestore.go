package iptables

import (
	"context"
	"errors"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file decides which scripts canaryd writes to legacy tables by bytes (xtwrite.go), and which
// iptables-restore writes as text.

// Writes implements Session. It writes a rule without a text by its bytes.
func (s *contentSession) Writes(rule rules.Rule) bool {
	_, opaque := rule.Opaque()
	return !opaque || rule.HasBytes() && canReplace()
}

// directly returns, by their indexes, the scripts that are written by bytes. sums are the
// checksums of the family's tables at the guard of the Restore, by which place finds any later
// write. A script that goes as text has only texts with known bytes: else it could not be proved.
func (s *contentSession) directly(family rules.Family, scripts []Script, sums map[rules.TableName]uint64) map[int]*xtWrite {
	direct := map[int]*xtWrite{}
	for i := range scripts {
		script := &scripts[i]
		if !canReplace() || s.kernel.goesAsText(script) && script.textless() == nil && !s.kernel.lacksBytes(family, script) {
			continue
		}
		w := &xtWrite{kernel: s.kernel, socket: s.kernel.reader.(xtReader).sockets[family], lexicon: s.kernel.source[family], family: family, script: script}
		w.sum, w.listed = sums[script.Table]
		direct[i] = w
	}
	return direct
}

// restore writes scripts of one family, table by table, for write. direct has, by index, the
// scripts to write by bytes. iptables-restore writes the others, and those whose table the kernel
// refuses: it names the refused rule. After the first write, a stale read is found too late, and
// counts as raced.
func (s *contentSession) restore(ctx context.Context, family rules.Family, scripts []Script, direct map[int]*xtWrite) (raced bool, err error) {
	var text Scripts
	wrote := map[rules.TableName]bool{}
	for i := range scripts {
		if d := direct[i]; d != nil && len(scripts) > 1 && !d.anyway {
			if err := d.teach(ctx); err != nil {
				return false, err
			}
		}
	}
	for i := range scripts {
		d := direct[i]
		if d == nil {
			text, wrote[scripts[i].Table] = append(text, scripts[i]), true
			continue
		}
		if len(text) > 0 {
			if err := s.kernel.restore(ctx, family, text); err != nil {
				return raced, err
			}
			text, ctx = nil, context.WithoutCancel(ctx) // all of it belongs together
		}
		if wrote[d.script.Table] {
			if err := d.read(d.note); err != nil {
				return raced, err
			}
		}
		d.anyway = d.anyway || len(wrote) > 0
		err := d.write(ctx)
		raced = raced || d.raced
		if _, refused := errors.AsType[*RestoreError](err); refused && d.script.textless() == nil {
			d.refused = err
			if err = d.unmoved(); err == nil {
				err = s.kernel.restore(ctx, family, Scripts{*d.script})
			}
		}
		if err != nil {
			return raced, err
		}
		wrote[d.script.Table], ctx = true, context.WithoutCancel(ctx)
	}
	if len(text) == 0 {
		return raced, nil
	}
	return raced, s.kernel.restore(ctx, family, text)
}
