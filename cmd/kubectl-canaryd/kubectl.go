package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A kubectl is the program that knows the cluster and has the credentials.
type kubectl struct {
	program string
	global  []string // flags of each call
}

// An answer is the output of one call of kubectl.
type answer struct {
	out  []byte
	said string // the last line of the error stream
	code int
	// err is set if kubectl was not found, exceeded its time, or wrote too much. out is useless
	// then.
	err error
}

// lingering is how long the output of an ended program may stay open, because a plugin for
// credentials may have started a process that continues.
const lingering = 2 * time.Second

// run executes kubectl without a shell, and without standard input.
func (k kubectl) run(ctx context.Context, most int, words ...string) answer {
	return k.runWith(ctx, nil, nil, most, words...)
}

// runWith executes kubectl for the user, who may type a password on in and reads its messages
// on says (nil: none). It stops kubectl after more than most bytes. An exit code is no err of
// the answer.
func (k kubectl) runWith(ctx context.Context, in *os.File, says io.Writer, most int, words ...string) answer {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &bounded{most: most, full: func() {
		cancel(fmt.Errorf("the answer is longer than %d MiB", most>>20))
	}}
	var errs tail
	cmd := exec.CommandContext(ctx, k.program, slices.Concat(k.global, words)...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, &errs, lingering
	if in != nil {
		cmd.Stdin = in
	}
	if says != nil {
		cmd.Stderr = io.MultiWriter(&errs, says)
	}
	err := cmd.Run()
	a := answer{out: out.Bytes(), said: errs.last()}
	exit := (*exec.ExitError)(nil)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		a.err = context.Cause(ctx)
		if errors.Is(a.err, context.Canceled) {
			a.err = errors.New("interrupted")
		}
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		a.code = exit.ExitCode()
	case errors.Is(err, exec.ErrWaitDelay): // it ended well, but another process has its output
	default:
		a.err = err
	}
	return a
}

// failed returns why an answer is a failure: kubectl's error, or else its last words; nil if
// the exit code is 0.
func (a answer) failed() error {
	switch {
	case a.err != nil:
		return a.err
	case a.code != 0:
		return errors.New(cmp.Or(a.said, fmt.Sprintf("kubectl ended with exit code %d", a.code)))
	default:
		return nil
	}
}

// bounded keeps the bytes up to a limit, then calls full, and drops the rest.
type bounded struct {
	bytes.Buffer
	most int
	full func()
}

// Write keeps the output of kubectl. A write above most calls full, which ends kubectl, and is
// dropped.
func (b *bounded) Write(p []byte) (int, error) {
	if b.Len()+len(p) > b.most {
		b.full()
		return len(p), nil
	}
	return b.Buffer.Write(p)
}

// ReadFrom hides the buffer's ReadFrom, which has no limit.
func (b *bounded) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{b}, r)
}

// tail keeps the last written bytes.
type tail struct{ text []byte }

// Write keeps the end of the messages of kubectl, for last.
func (t *tail) Write(p []byte) (int, error) {
	const kept = 4096
	t.text = append(t.text, p...)
	if over := len(t.text) - kept; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(p), nil
}

// last returns the last line with a message, as the reason of a failure; "" if there is none.
// kubectl exec ends with the exit code of the program in the pod, after that program's own
// words.
func (t *tail) last() string {
	lines := strings.Split(strings.TrimSpace(string(t.text)), "\n")
	for _, line := range slices.Backward(lines) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "command terminated with exit code") {
			return clip(line)
		}
	}
	return ""
}

// mostText bounds another program's text in a row, in bytes.
const mostText = 400

// clip bounds a text of another program: the answer of a pod must not fill the terminal or the
// memory.
func clip(text string) string {
	if len(text) <= mostText {
		return text
	}
	return strings.ToValidUTF8(text[:mostText], "") + "..."
}

// names match names of pods, nodes, namespaces and containers (RFC 1123). None looks like a
// flag or a path.
var names = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

func isName(text string) bool { return names.MatchString(text) && !strings.Contains(text, "..") }

// userName returns the user's name in the session. It is a claim, and no proof.
func userName() string {
	name := cmp.Or(os.Getenv("SUDO_USER"), os.Getenv("USER"))
	return name[:min(len(name), 40)]
}
