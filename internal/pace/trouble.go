package pace

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
)

// complainEvery is the shortest time between two log lines about the same trouble.
const complainEvery = 30 * time.Second

// A Trouble is a lasting problem that canaryd meets again and again, and logs once. A trouble
// that ends and returns, or has other words each time, is logged at most once in complainEvery.
type Trouble struct {
	What   string    // empty: there is none
	Cause  string    // the kernel's words for it, if it has any
	logged string    // the words in the log; empty: none
	at     time.Time // the time of the last log line about it
}

// There reports whether there is trouble now.
func (t *Trouble) There() bool { return t.What != "" }

// Met notes the trouble, and reports whether to log it: only new words, and at most one line in
// each complainEvery.
func (t *Trouble) Met(err error, now time.Time) bool {
	t.What, t.Cause = err.Error(), CauseOf(err)
	if t.What == t.logged || !t.at.IsZero() && now.Sub(t.at) < complainEvery {
		return false
	}
	t.logged, t.at = t.What, now
	return true
}

// MetAgain is Met, but logs a lasting trouble again in each complainEvery, and new words at
// once.
func (t *Trouble) MetAgain(err error, now time.Time) bool {
	t.What, t.Cause = err.Error(), CauseOf(err)
	if t.What == t.logged && now.Sub(t.at) < complainEvery {
		return false
	}
	t.logged, t.at = t.What, now
	return true
}

// Over notes the end of the trouble, and reports whether to log that. It is logged if the
// trouble was.
func (t *Trouble) Over() bool {
	logged := t.logged != ""
	t.What, t.Cause, t.logged = "", "", ""
	return logged
}

// Report notes an error and logs it if Met says so; a nil error means that the trouble is over.
// It then returns Over's result, and else false.
func (t *Trouble) Report(ctx context.Context, err error, what string, values ...any) (over bool) {
	if err == nil {
		return t.Over()
	}
	if t.Met(err, time.Now()) {
		klog.FromContext(ctx).WithCallDepth(1).Error(err, what, values...)
	}
	return false
}

// Warnings returns a context in which troubles are logged as warnings, because no rules are
// lost yet.
func Warnings(ctx context.Context) context.Context {
	return klog.NewContext(ctx, severity.Warnings(klog.FromContext(ctx)))
}

// Unusable returns the log for an unused file of an earlier run; err is why it is not used. A
// file of another boot or network namespace is no trouble, because each reboot leaves one.
func Unusable(log klog.Logger, err error) klog.Logger {
	if errors.Is(err, reload.ErrForeign) {
		return severity.Infos(log)
	}
	return severity.Warnings(log)
}

// CauseOf returns the root of an error in words that quote no rule: the kernel's words for its
// errors, or that time ran out. It is "" for all other errors. Status and headline show it.
func CauseOf(err error) string {
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		return errno.Error()
	case errors.Is(err, context.DeadlineExceeded):
		return "it took too long"
	default:
		return ""
	}
}

// A Shared is a trouble that any goroutine may meet.
type Shared struct {
	mu      sync.Mutex
	trouble Trouble
}

// Take notes an error; nil means that the trouble is over. It reports whether to log that. Any
// goroutine may call it.
func (t *Shared) Take(err error, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		return t.trouble.Over()
	}
	return t.trouble.Met(err, now)
}

// Text returns the words of the trouble for a Status; empty if there is none. Any goroutine may
// call it.
func (t *Shared) Text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trouble.What
}
