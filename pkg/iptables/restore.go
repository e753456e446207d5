package iptables

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// restore feeds input to one "iptables-restore --noflush". After its start it has its own
// deadline and ignores ctx: a killed restore leaves some tables written and others not. A
// refusal is a *RestoreError.
//
// It always passes -w. Without it, legacy 1.8.9 waits for ever for the private lock, which
// another child of canaryd may hold.
func (k *Kernel) restore(ctx context.Context, family rules.Family, input io.WriterTo) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	path := k.tools[family].restore
	if err := k.tools[family].missing; err != nil {
		return &RestoreError{Program: path, Reason: ReasonNotInstalled, Stderr: err.Error()}
	}
	if scripts, ok := input.(Scripts); ok {
		if err := scripts.checkText(filepath.Base(path)); err != nil {
			return err
		}
	}
	res, err := command{
		path:    path,
		args:    []string{"--noflush", "-w", k.waitSeconds()},
		stdin:   input,
		timeout: k.cfg.RestoreTimeout,
		env:     k.childEnv(),
		started: k.children.note,
	}.run(context.WithoutCancel(ctx))
	if err == nil && res.exit == 0 && len(res.stdout) > 0 {
		// It mistook a rule's word for -h, -V or -L, and wrote nothing from there on.
		text := "it ended with 0, but printed something instead of writing: " + firstLines(res.stdout)
		return &RestoreError{Program: filepath.Base(path), Reason: ReasonParse, Stderr: text}
	}
	if err == nil && res.exit == 0 {
		return nil
	}
	if err != nil {
		return &RestoreError{Program: filepath.Base(path), Exit: res.exit, Reason: ReasonOther, Stderr: err.Error()}
	}
	return Refusal(filepath.Base(path), res.exit, res.stderr)
}

// Refusal returns the error for a program that refused a restore, by its exit code and its
// complaints.
func Refusal(program string, exit int, stderr []byte) *RestoreError {
	return &RestoreError{Program: program, Exit: exit, Reason: classify(string(stderr)), Stderr: firstLines(stderr)}
}

func (k *Kernel) waitSeconds() string {
	return strconv.Itoa(max(1, int(k.cfg.LockWait.Round(time.Second)/time.Second)))
}

// Scripts are the input of one iptables-restore.
type Scripts []Script

// WriteTo implements io.WriterTo: it writes one script after the other, as command.feed reads
// them.
func (t Scripts) WriteTo(out io.Writer) (int64, error) {
	var written int64
	for i := range t {
		n, err := t[i].WriteTo(out)
		written += n
		if err != nil {
			return written, err
		}
	}
	return written, nil
}

// checkText refuses scripts that contain a rule without a text; restore and writeRest call it
// first. Such a rule could not be written by its bytes, and nothing of the scripts is written.
func (t Scripts) checkText(program string) *RestoreError {
	for i := range t {
		if s := t[i].textless(); s != nil {
			reason, _ := s.Rule.Opaque()
			return &RestoreError{Program: program, Reason: ReasonParse, Textless: true, Stderr: fmt.Sprintf("a rule of chain %s has no text: %s", s.Chain, reason)}
		}
	}
	return nil
}

// textless returns the first step whose rule has no text, nil if there is none. Only a script
// without such a step can be text for iptables-restore.
func (s *Script) textless() *Step {
	for i := range s.Steps {
		step := &s.Steps[i]
		if _, opaque := step.Rule.Opaque(); opaque && (step.Verb != Delete || step.Index == 0) {
			return step
		}
	}
	return nil
}

// commits counts the scripts that write anything. restoreByText takes more commits than that
// for another process's. iptables-nft-restore sends one batch at each COMMIT line, and none if
// there is nothing in it (1.8.9). Declaring empty chains makes none, so the count is an upper
// bound.
func (t Scripts) commits() uint32 {
	var n uint32
	for i := range t {
		if !t[i].Empty() {
			n++
		}
	}
	return n
}
