package iptables

import (
	"bytes"
	"context"
	"path/filepath"
	"strconv"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// restore feeds payload to one "iptables-restore --noflush". Once started it
// runs on its own deadline and not on ctx: a restore that is killed half-way
// leaves some tables written and others not.
//
// -w is always given: without it legacy 1.8.9 waits for ever, here for one of
// our own children that share the private lock.
func (k *Kernel) restore(ctx context.Context, family rules.Family, payload []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	path := k.tools[family].restore
	res, err := command{
		path:    path,
		args:    []string{"--noflush", "-w", k.waitSeconds()},
		stdin:   payload,
		timeout: k.cfg.RestoreTimeout,
		env:     k.childEnv(),
	}.run(context.WithoutCancel(ctx))
	if err == nil && res.exit == 0 {
		return nil
	}
	refused := &RestoreError{Program: filepath.Base(path), Exit: res.exit, Stderr: firstLines(res.stderr)}
	if err != nil {
		refused.Reason = ReasonOther
		refused.Stderr = err.Error()
		return refused
	}
	refused.Reason, refused.Line = classify(string(res.stderr))
	return refused
}

func (k *Kernel) waitSeconds() string {
	return strconv.Itoa(max(1, int(k.cfg.LockWait.Round(time.Second)/time.Second)))
}

// sections counts the tables of a payload that write anything. On nft each of
// them is exactly one commit: iptables-nft-restore sends one batch at each
// COMMIT line, and none if there is nothing in it (1.8.9). A section that only
// declares an empty chain which is empty already makes no commit either, so
// the count is an upper bound.
func sections(payload []byte) uint32 {
	var n uint32
	content := false
	for line := range bytes.Lines(payload) {
		switch line = bytes.TrimSpace(line); {
		case len(line) == 0, line[0] == '#':
		case line[0] == '*':
			content = false
		case string(line) == "COMMIT":
			if content {
				n++
			}
			content = false
		default:
			content = true
		}
	}
	return n
}
