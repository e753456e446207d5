package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file writes scripts to legacy tables by the bytes of their rules. canaryd reads the table,
// applies the script, and replaces the whole table or nothing. iptables-restore writes texts
// without bytes to a chain that nothing jumps to before, as nftteach.go does. Until the table is
// replaced, no packet meets any of these rules.

// An xtWrite is the write of one script.
type xtWrite struct {
	kernel  *Kernel
	socket  *xtSocket
	lexicon *lexicon
	family  rules.Family
	script  *Script
	anyway  bool // also after another process's write since the guard, which raced reports
	raced   bool
	refused error // why iptables-restore writes the script; else nil

	listed bool   // the table exists
	sum    uint64 // of the table's bytes before
	// The chains and the checksum of the content before, if staged has any rule; else 0.
	chains  map[string]bool
	content uint64
	staged  []int        // the steps with rules for iptables-restore, in order
	jumps   map[int]bool // the staged steps whose rules jump
	pieces  []xtPiece    // by step
	numbers usedNumbers  // of the ipsets in pieces
	bytes   [2][]byte    // room for a rule, as nf_tables has it and as an entry
}

// placeTries bounds the attempts to read and replace a table. An attempt fails if another
// process ignores the lock and writes between the two, which are a fraction of a millisecond
// apart.
const placeTries = 3

// write writes the script as this file's first comment describes. contentSession.restore calls
// it. After nft.ErrStale the tables must be read again: another process wrote since the guard, or
// rules in force turned out to have texts of the script. Other errors are a refusal of the script.
// TextChain is removed after any error.
func (w *xtWrite) write(ctx context.Context) error {
	stage, err := w.stage()
	if err != nil {
		return err
	}
	if len(w.staged) > 0 || !w.listed {
		if err := w.kernel.restore(ctx, w.family, Scripts{stage}); err != nil {
			return err
		}
	}
	for range placeTries {
		var failed error // apart from errors of the read, which would be repeated
		err = w.read(func(content *xtContent, sum uint64) error {
			if failed = w.place(content, sum); failed != nil {
				failed = fmt.Errorf("table %s: %w", w.script.Table, failed)
			}
			return nil
		})
		if err = cmp.Or(err, failed); err == nil {
			return nil
		}
		if !w.anyway || !errors.Is(err, nft.ErrStale) {
			break
		}
		w.raced = true
	}
	if !w.numbers.current() {
		err = nft.ErrStale
	}
	if len(w.staged) > 0 || !w.listed {
		if failed := w.unstage(ctx); failed != nil {
			err = fmt.Errorf("%w; and %w", err, failed)
		}
	}
	if errors.Is(err, nft.ErrStale) && !w.anyway || errors.Is(err, nft.ErrPermission) {
		return err
	}
	others := errors.Is(err, errScript) || errors.Is(err, errWalk) || errors.Is(err, nft.ErrStale)
	return w.refusal(err, !others)
}

// teach reads the bytes of texts before restore writes the first of several tables. Its error is
// nft.ErrStale, for the reasons of write: after the first write it would be too late. All other
// errors are for write to find.
func (w *xtWrite) teach(ctx context.Context) error {
	stage, err := w.stage()
	if err != nil || len(w.staged) == 0 {
		return onlyStale(err)
	}
	if err := w.kernel.restore(ctx, w.family, Scripts{stage}); err != nil {
		return nil
	}
	err = w.read(w.take)
	if w.unstage(ctx) == nil && err == nil {
		err = w.read(func(now *xtContent, sum uint64) error {
			if w.moved(now, sum) {
				return nft.ErrStale
			}
			return w.note(now, sum)
		})
	}
	return onlyStale(err)
}

// onlyStale returns the error if it is nft.ErrStale, for teach; else nil.
func onlyStale(err error) error {
	if errors.Is(err, nft.ErrStale) {
		return err
	}
	return nil
}

// unstage removes TextChain, which the script of stage made. Its error is no *RestoreError: that is
// only for a refusal of w.script, which restore then writes as text.
func (w *xtWrite) unstage(ctx context.Context) error {
	remove := Script{Table: w.script.Table, Declare: []string{TextChain}, Steps: []Step{{Verb: Drop, Chain: TextChain}}}
	if err := w.kernel.restore(context.WithoutCancel(ctx), w.family, Scripts{remove}); err != nil {
		return fmt.Errorf("chain %s could not be removed: %v", TextChain, err)
	}
	return nil
}

// refusal returns the error of a refused write. textless says whether a rule without a text may
// be the cause.
func (w *xtWrite) refusal(err error, textless bool) *RestoreError {
	refused := &RestoreError{Program: "x_tables", Reason: ReasonOther, Textless: textless, Stderr: err.Error()}
	if errors.Is(err, ErrNoSet) {
		refused.Reason = ReasonMissingSet
	}
	return refused
}

// read calls f with the table's content, and with a checksum of its bytes, as tableSum makes for a
// guard. The error is nft.ErrStale if the table never stays unchanged.
func (w *xtWrite) read(f func(content *xtContent, sum uint64) error) error {
	err := w.socket.entries(w.script.Table, func(info xtInfo, data []byte) error {
		// The walk masks bytes that are not content.
		if err := walkEntries(w.family, info, data, xtVisitor{chain: func(string, int) {}, rule: func(xtRule) {}}); err != nil {
			return err
		}
		content, err := takeApart(w.family, info, data)
		if err != nil {
			return err
		}
		return f(content, tableSum(info, data))
	})
	if errors.Is(err, unix.EAGAIN) {
		return nft.ErrStale
	}
	return err
}

// note notes the checksum of the table after canaryd has written it.
func (w *xtWrite) note(_ *xtContent, sum uint64) error {
	w.sum, w.listed = sum, true
	return nil
}

// moved reports whether another process wrote since the guard. The content has no TextChain any
// more. A table that stage made is empty.
func (w *xtWrite) moved(content *xtContent, sum uint64) bool {
	switch {
	case !w.listed:
		return slices.ContainsFunc(content.chains, func(c *xtPieces) bool { return c.head != nil || len(c.rules) > 0 })
	case w.content == 0: // iptables-restore has written nothing
		return sum != w.sum
	}
	return content.sum() != w.content
}

// unmoved returns nft.ErrStale if another process wrote since the guard. restore calls it before
// iptables-restore writes a refused script, which may not fit any more.
func (w *xtWrite) unmoved() error {
	if !w.listed { // a query would create the table
		return nil
	}
	err := w.read(func(content *xtContent, sum uint64) error {
		if w.moved(content, sum) {
			return w.stale()
		}
		return nil
	})
	if w.anyway {
		return nil
	}
	return err
}

// look notes the table's chains, and a checksum of the content that does not count TextChain,
// before stage uses that. The error is nft.ErrStale if another process wrote since the guard.
func (w *xtWrite) look() error {
	w.chains = map[string]bool{}
	for _, name := range w.script.Declare {
		w.chains[name] = true
	}
	if !w.listed { // a query would create the table
		return nil
	}
	return w.read(func(content *xtContent, sum uint64) error {
		if w.moved(content, sum) {
			if err := w.stale(); err != nil {
				return err
			}
		}
		content.remove(TextChain)
		for _, c := range content.chains {
			w.chains[c.name] = true
		}
		w.content = content.sum()
		return nil
	})
}

// stale returns nft.ErrStale for a write of a process that ignores the lock; with anyway it notes
// the write, and returns nil.
func (w *xtWrite) stale() error {
	if w.anyway {
		w.raced = true
		return nil
	}
	return nft.ErrStale
}

// stage notes the rules whose bytes are known, and returns the script that writes the others to
// TextChain; write executes it. A rule may jump to a chain that does not exist yet: there it jumps
// to its own chain instead. The error refuses the script.
func (w *xtWrite) stage() (Script, error) {
	stage := Script{Table: w.script.Table, Declare: []string{TextChain}}
	w.pieces, w.jumps, w.staged, w.content = make([]xtPiece, len(w.script.Steps)), map[int]bool{}, nil, 0
	w.numbers.index, w.numbers.used = w.kernel.sets, nil
	for i := range w.script.Steps {
		step := &w.script.Steps[i]
		if step.Verb == Flush || step.Verb == Drop || step.Verb == Delete && step.Index > 0 {
			continue
		}
		w.pieces[i] = xtPiece{fresh: &step.Rule, was: -1}
		if _, opaque := step.Rule.Opaque(); opaque && !step.Rule.HasBytes() {
			return stage, Scripts{{Table: w.script.Table, Steps: []Step{*step}}}.checkText("x_tables")
		} else if !opaque && !w.kernel.hasBytes(w.family, step.Rule, &w.bytes[0]) {
			w.staged = append(w.staged, i)
		} else if step.Verb == Delete {
			var err error
			if w.pieces[i], err = w.piece(&step.Rule); err != nil {
				return stage, w.refusal(fmt.Errorf("table %s: %w", w.script.Table, err), opaque)
			}
			w.pieces[i].bytes = slices.Clone(w.pieces[i].bytes)
		}
	}
	if len(w.staged) == 0 {
		return stage, nil
	}
	if err := w.look(); err != nil {
		return stage, err
	}
	for _, i := range w.staged {
		rule := w.script.Steps[i].Rule
		if w.jumps[i] = rule.Target != "" && w.chains[rule.Target]; w.jumps[i] {
			rule = rule.WithTarget(TextChain)
		}
		stage.Steps = append(stage.Steps, Step{Verb: Append, Chain: TextChain, Rule: rule})
	}
	return stage, nil
}

// piece returns a rule with known bytes as an entry to write, valid until the next call. The error
// says which object of the kernel it lacks, or that its bytes alone do not make it again.
func (w *xtWrite) piece(rule *rules.Rule) (xtPiece, error) {
	raw, known := w.lexicon.raw(*rule, w.bytes[0])
	if !known {
		return xtPiece{}, fmt.Errorf("%w: %q", errUnknownRule, rule.Label())
	}
	w.bytes[0] = raw.Expressions
	if _, err := needsOf(raw, w.family); err != nil {
		return xtPiece{}, err
	}
	if err := pinnedStand(raw); err != nil {
		return xtPiece{}, err
	}
	raw, err := numberSets(raw, w.numbers.number)
	if err != nil {
		return xtPiece{}, err
	}
	piece, err := pieceOf(w.family, raw, w.bytes[1])
	if err == nil {
		w.bytes[1] = piece.bytes
	}
	return piece, err
}

// place changes the table that was read, and immediately replaces it; write calls it with a
// fresh read. It returns nft.ErrStale if another process wrote since the guard; with anyway, only
// if one wrote since the read.
func (w *xtWrite) place(content *xtContent, sum uint64) error {
	if err := w.take(content, sum); err != nil {
		return err
	}
	if err := content.declare(w.script.Declare); err != nil {
		return err
	}
	for i := range w.script.Steps {
		if err := content.apply(&w.script.Steps[i], w.pieces[i]); err != nil {
			return err
		}
	}
	out := &xtPages{}
	defer out.free()
	if err := out.add(make([]byte, xtReplaceHeadLen)); err != nil {
		return err
	}
	now, was, err := content.join(out, w.piece)
	if err != nil {
		return err
	}
	return w.socket.replace(content.info, now, out.mem[:out.used], was)
}

// take takes TextChain out of the content, and notes the bytes of its rules, for place and teach.
// The error is nft.ErrStale if another process wrote since the guard (stale). It is, too, if rules
// in force turned out to have these texts: the script would write them a second time.
func (w *xtWrite) take(content *xtContent, sum uint64) error {
	text := content.remove(TextChain)
	if w.moved(content, sum) {
		if err := w.stale(); err != nil {
			return err
		}
	}
	if len(w.staged) > 0 && (text == nil || len(text.rules) != len(w.staged)) {
		return fmt.Errorf("%w: chain %s does not hold the %d rules that iptables-restore wrote", errScript, TextChain, len(w.staged))
	}
	revealed := w.lexicon.revealed.Load()
	for n, i := range w.staged {
		piece := text.rules[n]
		piece.was = -1
		if w.jumps[i] {
			piece.goal = w.script.Steps[i].Rule.Target
		}
		w.pieces[i] = piece
		if err := w.name(content.raw(piece), w.script.Steps[i].Rule); err != nil {
			return err
		}
	}
	if !w.anyway && w.lexicon.revealed.Load() != revealed {
		return nft.ErrStale
	}
	return nil
}

// name notes the text from which iptables-restore made these bytes.
func (w *xtWrite) name(raw nft.Rule, rule rules.Rule) error {
	named, err := nameSets(raw, w.kernel.sets.name)
	if err != nil {
		return nil // its bytes identify nothing
	}
	return w.lexicon.name(named, rule)
}
