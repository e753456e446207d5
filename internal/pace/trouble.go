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

// complainEvery is the least distance of two log lines about the same trouble.
const complainEvery = 30 * time.Second

// A Trouble is something that lasts, is met again and again, and that the log has
// once. Of one that comes and goes, or has other words each time, the log
// has a line in complainEvery.
type Trouble struct {
	What   string    // empty: there is none
	Cause  string    // the kernel's words for it, if it has any
	logged string    // what the log has of it; empty: nothing
	at     time.Time // when the log had something of it last
}

// There reports whether there is trouble now.
func (t *Trouble) There() bool { return t.What != "" }

// Met takes up the trouble, and reports whether the log is to have it.
func (t *Trouble) Met(err error, now time.Time) bool {
	t.What, t.Cause = err.Error(), CauseOf(err)
	if t.What == t.logged || !t.at.IsZero() && now.Sub(t.at) < complainEvery {
		return false
	}
	t.logged, t.at = t.What, now
	return true
}

// MetAgain is Met for a trouble of which the log is reminded in each complainEvery, and has
// other words at once.
func (t *Trouble) MetAgain(err error, now time.Time) bool {
	t.What, t.Cause = err.Error(), CauseOf(err)
	if t.What == t.logged && now.Sub(t.at) < complainEvery {
		return false
	}
	t.logged, t.at = t.What, now
	return true
}

// Over takes up that there is none any more, and reports whether the log is to have
// that: it is, if it has that there was.
func (t *Trouble) Over() bool {
	logged := t.logged != ""
	t.What, t.Cause, t.logged = "", "", ""
	return logged
}

// Report takes up an error, which it logs if the log is to have it, or with nil that there is no
// trouble any more. It returns Over's answer then, else false.
func (t *Trouble) Report(ctx context.Context, err error, what string, values ...any) (over bool) {
	if err == nil {
		return t.Over()
	}
	if t.Met(err, time.Now()) {
		klog.FromContext(ctx).WithCallDepth(1).Error(err, what, values...)
	}
	return false
}

// Warnings returns a context in which a trouble is logged as a warning: nothing is lost by it yet.
func Warnings(ctx context.Context) context.Context {
	return klog.NewContext(ctx, severity.Warnings(klog.FromContext(ctx)))
}

// Unusable returns the log for a file of an earlier run that is not used. A file of another boot or
// network namespace is no trouble: each reboot leaves one.
func Unusable(log klog.Logger, err error) klog.Logger {
	if errors.Is(err, reload.ErrForeign) {
		return severity.Infos(log)
	}
	return severity.Warnings(log)
}

// CauseOf returns what is at the bottom of an error, in words that quote no rule: the kernel's for
// its errors, and that the time ran out. It is empty for all others.
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

// Take takes up an error, or with nil that there is no trouble any more. It reports whether the
// log is to have that.
func (t *Shared) Take(err error, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		return t.trouble.Over()
	}
	return t.trouble.Met(err, now)
}

// Text returns what the trouble is; empty: there is none.
func (t *Shared) Text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trouble.What
}
