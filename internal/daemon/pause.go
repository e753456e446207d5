package daemon

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A pause is for planned work. A pause that outlasts a day has been forgotten, and leaves the
// node without a guard.
const (
	leastPause = api.LeastPause
	mostPause  = api.MostPause
)

// pause has the time until which replays wait.
type pause struct {
	until time.Time // zero: not paused
	since time.Time
	by    string // the client that paused
	why   string
}

// pauseToKeep returns the pause as the disk has it; nil if there is none. Its end is also an
// uptime, because a clock may be set.
func (d *Daemon) pauseToKeep(st *state) *reload.Pause {
	if !st.pause.on() {
		return nil
	}
	return &reload.Pause{Until: st.pause.until, Uptime: d.cfg.Uptime() + time.Until(st.pause.until), Since: st.pause.since, By: st.pause.by, Why: st.pause.why}
}

// recallPause continues a pause of the last run, until its end; kept is nil if there was none.
// The end is counted by the machine's uptime, because the clock on the wall may be set.
func (d *Daemon) recallPause(ctx context.Context, st *state, kept *reload.Pause) {
	if kept == nil {
		return
	}
	left := kept.Uptime - d.cfg.Uptime()
	if left <= 0 || left > mostPause {
		return
	}
	st.pause = pause{until: time.Now().Add(left), since: kept.Since, by: kept.By, why: kept.Why}
	severity.Notices(klog.FromContext(ctx)).Info("Replays are still paused: the pause of the last run continues", "until", st.pause.until.UTC().Format(time.RFC3339),
		"since", kept.Since.UTC().Format(time.RFC3339), "by", kept.By, "why", kept.Why, "end", "canaryd resume")
}

// on reports whether replays are paused.
func (p *pause) on() bool { return !p.until.IsZero() }

// mostName is how many characters of a name that a client gave are kept.
const mostName = 64

// shortened returns the beginning of a client's text, at most so many characters (most), to fit
// into a line. Control characters are escaped.
func shortened(text string, most int) string {
	var b strings.Builder
	for _, r := range strings.ToValidUTF8(text, "?") {
		if most--; most < 0 {
			break
		}
		if strconv.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// CheckWhy returns an error unless a reason fits into a line. The first argument names the
// reason in the error.
func CheckWhy(what, text string) error {
	if n := utf8.RuneCountInString(text); n > api.MostWhy {
		return fmt.Errorf("%s has %d characters: want at most %d", what, n, api.MostWhy)
	}
	return nil
}

// CheckPause returns an error unless a pause may last that long. The first argument names the
// pause in the error.
func CheckPause(what string, length time.Duration) error {
	if length < leastPause || length > mostPause {
		return fmt.Errorf("%s is %s: want at least %s and at most %s", what, length, leastPause, mostPause)
	}
	return nil
}

// Pause pauses replays for r.Seconds from now, whether or not they are paused already. canaryd
// still detects, counts and learns. Restore and Cleanup work anyway. A pause survives a
// restart, because planned work often includes one.
func (d *Daemon) Pause(ctx context.Context, r api.PauseRequest) (api.PauseReply, error) {
	// More seconds than a Duration holds are too many anyway.
	length := time.Duration(min(max(r.Seconds, 0), 1e9) * float64(time.Second))
	if err := cmp.Or(CheckPause("the pause", length), CheckWhy("the reason", r.Why)); err != nil {
		return api.PauseReply{}, err
	}
	var reply api.PauseReply
	err := d.askGuard(ctx, func(ctx context.Context, st *state) error {
		reply.WasPaused = st.pause.on()
		st.pause = pause{until: time.Now().Add(length), since: time.Now(), by: shortened(r.By, mostName), why: shortened(r.Why, api.MostWhy)}
		st.disk.marksChanged(time.Now())
		reply.Until = st.pause.until
		for _, a := range st.answers() { // their losses are recorded, and no longer tried
			a.retry.At = time.Now()
		}
		severity.Notices(klog.FromContext(ctx)).Info("Paused on request: canaryd records losses, but replays nothing",
			"by", st.pause.by, "why", st.pause.why, "for", length, "until", reply.Until.UTC().Format(time.RFC3339), "wasPaused", reply.WasPaused)
		return nil
	})
	return reply, err
}

// Resume ends a pause. Lost rules are replayed at once.
func (d *Daemon) Resume(ctx context.Context) (api.PauseReply, error) {
	var reply api.PauseReply
	err := d.askGuard(ctx, func(ctx context.Context, st *state) error {
		if reply.WasPaused = st.pause.on(); reply.WasPaused {
			d.unpause(ctx, st, "Resumed on request")
		}
		return nil
	})
	return reply, err
}

// unpause lets replays begin again, on request or at the pause's end; why is the log's line.
// Losses of the pause are replayed first.
func (d *Daemon) unpause(ctx context.Context, st *state, why string) {
	st.pause = pause{}
	st.disk.marksChanged(time.Now())
	next := "nothing is lost"
	for _, a := range st.answers() {
		a.retry.At, next = time.Now(), "replaying what is lost"
		if a.record.Outcome == api.WaitingPaused {
			a.record.Outcome = api.Pending
		}
	}
	severity.Notices(klog.FromContext(ctx)).Info(why, "next", next)
}

// recordPaused records the loss and leaves it until the pause ends. The marks stay as the flush
// left them: they show the replay which rules their owner did not touch. It returns true once
// owners have put all lost rules back. Then heal writes the missing marks in the pause, because
// canaryd would not notice the next flush without them.
func (d *Daemon) recordPaused(ctx context.Context, st *state) (back bool) {
	found, err := d.readLoss(ctx, st)
	if err != nil {
		d.healFailed(ctx, st, err)
		return false
	}
	for id, h := range found {
		d.take(st, tableFinding{id: id, source: lossesOnly, finding: h.Finding})
	}
	d.recordLosses(ctx, st, found)
	if l := st.loss; !l.shown() { // its owner was faster
		st.loss = nil
		d.backUnread(ctx, st, l)
		d.drillUndone(ctx, st, "replays were paused, and another process undid the drill")
		// On legacy the restored rules may have the former digest. Then no look makes an
		// examination due.
		for _, fs := range st.families {
			fs.markDirty(time.Now())
		}
		st.looking.plan(time.Now().Add(d.cfg.PollInterval))
		return false
	}
	if st.loss.lostRules() && !anyOf(found, func(h flushes.Hit) bool { return h.Lost.Any() }) {
		return true
	}
	d.keepHeld(ctx, st, st.loss.openRecord, api.WaitingPaused)
	st.loss.retry.At = st.pause.until
	return false
}

// recordMore has a loss of a pause recorded again if it has grown. openLoss calls it for each
// new evidence while a loss is open.
func (st *state) recordMore() {
	if !st.pause.on() {
		return
	}
	for id, ts := range st.tables() {
		if ts.verdict.Loss() && st.loss.hit[id] == "" {
			st.loss.retry.At = time.Now()
		}
	}
}
