package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file writes scripts with textless rules to legacy tables. iptables-restore writes the
// rules with a text to a chain that nothing jumps to. Then canaryd reads the table, applies the
// script, and replaces the whole table or nothing. Until then no packet meets any of these
// rules.
//
// The bytes of a rule may be written again as the kernel returns them. Each command of
// iptables-legacy reads all rules of its table and writes them back. Only numbers of kernel
// objects may become wrong through a flush, so a rule with such a number has no bytes here.

// exactBytes returns the bytes for writing a rule again: all but the verdict. goal is the
// target that its text must have. It is false if the bytes alone do not determine the rule's
// effect, or if an extension is not iptables'. keepBytes calls it.
func (r xtRule) exactBytes(goal string) (entry []byte, ok bool) {
	e := r.entry
	if e.isStandard && (len(e.target) != xtStandardLen || r.target && goal == "") {
		return nil, false
	}
	exact := !e.indexed()
	e.eachMatch(func(m []byte) {
		const elf = 2 // a program in a file that the writer of the rule has open
		kind := kindOf(m)
		_, known := extensions[kind.name]
		exact = exact && known && kind.name != "" && !(kind.name == "bpf" && kind.revision == 1 && xtData(m[xtExtDataAt:]).u16(0) == elf)
	})
	if _, known := extensions[string(extName(e.target))]; !known || !exact {
		return nil, false
	}
	if e.isStandard {
		return e.whole[:len(e.whole)-xtStandardLen+xtExtDataAt], true
	}
	return e.whole, true
}

// keepBytes stores the bytes of a rule that may turn out to have no text; shapes calls it.
// opaque then returns the rule with its bytes, so that a replay can write it. goal is the
// target that its text must have.
func (s *ruleShape) keepBytes(r xtRule, goal string) {
	const long = 4096 // fewer bytes of plain extensions have a text that iptables-restore reads
	isText := !slices.ContainsFunc(s.comments, func(comment string) bool { return !utf8.ValidString(comment) })
	if s.plain && s.odd == "" && len(r.entry.whole) <= long && isText {
		return
	}
	if exact, ok := r.exactBytes(goal); ok {
		s.exact, s.goal = slices.Clone(exact), goal
	}
}

// writesBytes reports whether rules of legacy tables are written by their bytes.
func (c Config) writesBytes() bool { return canReplace() && c.Replay != ReplayText }

// Writes implements Session. It writes a rule without a text by its bytes.
func (s *contentSession) Writes(rule rules.Rule) bool {
	_, opaque := rule.Opaque()
	return !opaque || rule.HasBytes() && s.kernel.cfg.writesBytes()
}

// lookExactly returns, by their indexes, the scripts that must be written by bytes. It notes
// the content of their tables, before the guard of a Restore, so that place finds any later
// write. It returns nil if this Kernel writes no bytes.
func (s *contentSession) lookExactly(ctx context.Context, family rules.Family, scripts []Script) (map[int]*exactWrite, error) {
	if s.closed || !s.kernel.cfg.writesBytes() {
		return nil, nil
	}
	exact := map[int]*exactWrite{}
	for i := range scripts {
		if scripts[i].textless() == nil {
			continue
		}
		if err := s.kernel.ready(ctx, family); err != nil {
			return nil, err
		}
		exact[i] = &exactWrite{kernel: s.kernel, socket: s.kernel.reader.(xtReader).sockets[family], family: family, script: &scripts[i]}
		if err := exact[i].look(); err != nil {
			return nil, err
		}
	}
	return exact, nil
}

// restore writes scripts of one family, table by table, for write. exact has, by index, the
// scripts to write by bytes. iptables-restore writes the others. After the first write, a stale
// read is found too late, and counts as raced.
func (s *contentSession) restore(ctx context.Context, family rules.Family, scripts []Script, exact map[int]*exactWrite) (raced bool, err error) {
	var text Scripts
	wrote := map[rules.TableName]bool{}
	for i := range scripts {
		e := exact[i]
		if e == nil {
			text, wrote[scripts[i].Table] = append(text, scripts[i]), true
			continue
		}
		if len(text) > 0 {
			if err := s.kernel.restore(ctx, family, text); err != nil {
				return raced, err
			}
			text, ctx = nil, context.WithoutCancel(ctx) // all of it belongs together
		}
		if wrote[e.script.Table] {
			if err := e.look(); err != nil {
				return raced, err
			}
		}
		e.anyway = e.anyway || len(wrote) > 0
		err := e.write(ctx)
		raced = raced || e.raced
		if err != nil {
			return raced, err
		}
		wrote[e.script.Table], ctx = true, context.WithoutCancel(ctx)
	}
	if len(text) == 0 {
		return raced, nil
	}
	return raced, s.kernel.restore(ctx, family, text)
}

// noteExact notes the rules that a script writes by their bytes. Until forgetExact, reads show
// them without a text, because the proof looks for the planned rules.
func (l *xtLexicon) noteExact(family rules.Family, script *Script) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range script.Steps {
		step := &script.Steps[i]
		key, ok := l.keyOf(family, step.Rule)
		if !ok {
			continue
		}
		place := Place{Table: script.Table, Chain: step.Chain}
		if l.exact[place] == nil {
			if l.exact == nil {
				l.exact = map[Place]map[xtKey]rules.Rule{}
			}
			l.exact[place] = map[xtKey]rules.Rule{}
		}
		l.exact[place][key] = step.Rule
	}
}

// keyOf returns the key under which a walk names an opaque rule in force; false if it has no
// bytes. Text finds the rule's text by it, and noteExact notes it.
func (l *xtLexicon) keyOf(family rules.Family, rule rules.Rule) (xtKey, bool) {
	piece, ok := newPiece(family, rule)
	if !ok {
		return xtKey{}, false
	}
	entry, goal, _, _ := rule.Bytes()
	to := string(goal)
	if piece.goal != "" {
		to = toChain(to)
	}
	return l.hashBytes(entry).with(l.hash(to)), true
}

// Text implements Session. Reads under the lock test the texts.
func (s *contentSession) Text(family rules.Family, rule rules.Rule) rules.Rule {
	if !rule.HasBytes() {
		return rule
	}
	l := s.kernel.words[family]
	l.mu.Lock()
	defer l.mu.Unlock()
	if key, ok := l.keyOf(family, rule); ok {
		if text, known := l.rule(key, l.now()); known {
			return text
		}
	}
	return rule
}

// forgetExact ends the effect of noteExact, when the Session is closed.
func (l *xtLexicon) forgetExact() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.exact = nil
}

// An exactWrite is the write of one script.
type exactWrite struct {
	kernel *Kernel
	socket *xtSocket
	family rules.Family
	script *Script
	anyway bool // also after another process's write since look, which raced reports
	raced  bool

	sum    uint64          // of the table before; 0 if there was none
	chains map[string]bool // existing chains, and those of the script's Declare
	staged []int           // the steps with rules for iptables-restore, in order
	jumps  map[int]bool    // the staged steps whose rules jump
	pieces []xtPiece       // by step
}

// placeTries bounds the attempts to read and replace a table. An attempt fails if another
// process ignores the lock and writes between the two, which are a fraction of a millisecond
// apart.
const placeTries = 3

// write writes the script as this file's first comment describes: first its texts to
// TextChain, then the whole table. contentSession.restore calls it. After nft.ErrStale the
// tables must be read again: another process wrote since look. Other errors are a refusal of
// the script; TextChain is removed after any error.
func (w *exactWrite) write(ctx context.Context) error {
	stage, err := w.stage()
	if err != nil {
		return err
	}
	if err := w.kernel.restore(ctx, w.family, Scripts{stage}); err != nil {
		return err
	}
	for range placeTries {
		var failed error // apart from errors of the read, which would be repeated
		err = w.socket.entries(w.script.Table, func(info xtInfo, data []byte) error {
			failed = w.place(info, data)
			return nil
		})
		if err = cmp.Or(err, failed); err == nil {
			return nil
		}
		if errors.Is(err, unix.EAGAIN) { // by the read: the table never stayed unchanged
			err = nft.ErrStale
		}
		if !w.anyway || !errors.Is(err, nft.ErrStale) {
			break
		}
		w.raced = true
	}
	remove := Script{Table: stage.Table, Declare: stage.Declare, Steps: []Step{{Verb: Drop, Chain: TextChain}}}
	if failed := w.kernel.restore(context.WithoutCancel(ctx), w.family, Scripts{remove}); failed != nil {
		err = fmt.Errorf("%w; and chain %s could not be removed: %w", err, TextChain, failed)
	}
	if errors.Is(err, nft.ErrStale) && !w.anyway || errors.Is(err, nft.ErrPermission) {
		return err
	}
	others := errors.Is(err, errScript) || errors.Is(err, errWalk) || errors.Is(err, nft.ErrStale)
	return w.refusal(err.Error(), !others)
}

// refusal returns the error of a refused write. textless says whether a rule without a text may
// be the cause.
func (w *exactWrite) refusal(text string, textless bool) *RestoreError {
	return &RestoreError{Program: "x_tables", Reason: ReasonOther, Textless: textless, Stderr: text}
}

// look notes the chains of the table and a checksum of its content, for stage and place.
// lookExactly calls it, and restore once more if an earlier script wrote the table. A table
// that does not exist has the sum 0.
func (w *exactWrite) look() error {
	w.chains = map[string]bool{}
	for _, name := range w.script.Declare {
		w.chains[name] = true
	}
	tables, err := w.socket.tables()
	if err != nil || !slices.Contains(tables, w.script.Table) { // a query would create it
		return err
	}
	return w.socket.entries(w.script.Table, func(info xtInfo, data []byte) error {
		content, err := takeApart(w.family, info, data)
		if err != nil {
			return err
		}
		content.remove(TextChain)
		for _, c := range content.chains {
			w.chains[c.name] = true
		}
		w.sum = content.sum()
		return nil
	})
}

// stage returns the script that writes the rules with a text to TextChain; write executes it. A
// rule may jump to a chain that does not exist yet: here it jumps to its own chain instead. The
// error refuses the script: a rule has neither a text nor bytes.
func (w *exactWrite) stage() (Script, error) {
	stage := Script{Table: w.script.Table, Declare: []string{TextChain}}
	w.pieces, w.jumps = make([]xtPiece, len(w.script.Steps)), map[int]bool{}
	for i := range w.script.Steps {
		step := &w.script.Steps[i]
		if step.Verb == Flush || step.Verb == Drop || step.Verb == Delete && step.Index > 0 {
			continue
		}
		reason, opaque := step.Rule.Opaque()
		if opaque {
			piece, ok := newPiece(w.family, step.Rule)
			if !ok {
				return stage, w.refusal(fmt.Sprintf("a rule of chain %s has neither a text nor bytes: %s", step.Chain, reason), true)
			}
			w.pieces[i] = piece
			continue
		}
		rule := step.Rule
		if w.jumps[i] = rule.Target != "" && w.chains[rule.Target]; w.jumps[i] {
			rule = rule.WithTarget(TextChain)
		}
		w.staged = append(w.staged, i)
		stage.Steps = append(stage.Steps, Step{Verb: Append, Chain: TextChain, Rule: rule})
	}
	return stage, nil
}

// place changes the table that was read, and immediately replaces it; write calls it with a
// fresh read. It returns nft.ErrStale if another process wrote since look; with anyway, only if
// one wrote since the read.
func (w *exactWrite) place(info xtInfo, data []byte) error {
	content, err := takeApart(w.family, info, data)
	if err != nil {
		return err
	}
	text := content.remove(TextChain)
	if text == nil || len(text.rules) != len(w.staged) {
		return fmt.Errorf("%w: chain %s does not hold the %d rules that iptables-restore wrote", errScript, TextChain, len(w.staged))
	}
	if w.sum != 0 && content.sum() != w.sum { // by a process that ignores the lock
		if !w.anyway {
			return nft.ErrStale
		}
		w.raced = true
	}
	for n, i := range w.staged {
		piece := text.rules[n]
		piece.was = -1
		if w.jumps[i] {
			piece.goal = w.script.Steps[i].Rule.Target
		}
		w.pieces[i] = piece
	}
	for _, name := range w.script.Declare {
		if err := content.declare(name, text); err != nil {
			return err
		}
	}
	for i := range w.script.Steps {
		if err := content.apply(&w.script.Steps[i], w.pieces[i]); err != nil {
			return err
		}
	}
	now, entries, was, err := content.join()
	if err != nil {
		return err
	}
	return w.socket.replace(info, now, entries, was)
}
