package daemon

import (
	"context"
	"maps"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// MostSettle bounds --settle, and a lull as a whole: rules that are gone for longer are an
// outage, and no longer a flusher's half-done work.
const MostSettle = 30 * time.Second

// A lull is the wait for a flusher to be done. A flush often is several commands, and half a
// flush is not worth a replay. So the wait lasts until no process wrote for --settle. It ends
// after ten times --settle, or MostSettle.
type lull struct {
	quiet time.Time // since when no process has written
	end   time.Time
	// wrote reports whether a process other than canaryd wrote since it was called last. It
	// opens gates of lost tables meanwhile.
	wrote func() bool
}

// newLull returns a wait that begins now; quiet is when a process wrote last.
func (d *Daemon) newLull(quiet time.Time) *lull {
	return &lull{quiet: quiet, end: time.Now().Add(min(10*d.cfg.Settle, MostSettle))}
}

// await waits until no process wrote for so long (long), or the lull is over. With brief it
// returns true as soon as a process writes: a plan that was made meanwhile is void.
func (l *lull) await(ctx context.Context, long time.Duration, brief bool) bool {
	const look = time.Millisecond // to read the stamps takes 3 to 24 µs
	for time.Since(l.quiet) < long && time.Now().Before(l.end) {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(min(look, long)):
		}
		if l.moved() && brief {
			return true
		}
	}
	return false
}

// moved reports whether a process wrote: the quiet then begins again.
func (l *lull) moved() bool {
	wrote := l.wrote()
	if wrote {
		l.quiet = time.Now()
	}
	return wrote
}

// An iptablesLull waits for the flusher of iptables' tables.
type iptablesLull struct {
	*lull
	stamps map[rules.Family]iptables.Stamp // as they were seen last
	native uint32                          // the genid at which native tables were looked at last
	wordBy time.Time                       // until when to wait for the notification of a commit that the stamps show; zero: no more
}

// wordMost is how long the kernel may take to notify of a commit that packets have felt: 0.3 s
// at 5,000 services (Linux 6.18). There is no notification of canaryd's own commits if it did
// not listen.
const wordMost = 500 * time.Millisecond

// beginLull begins the wait for the flusher: it takes the stamps, reads restored tables, and
// opens gates of the standby. If the flusher's commit is still under way, the quiet begins
// after it.
func (d *Daemon) beginLull(ctx context.Context, st *state) *iptablesLull {
	l := &iptablesLull{lull: d.newLull(time.Now()), stamps: d.stamps(ctx, st)}
	l.wrote = func() bool { return d.wrote(ctx, st, l) }
	if st.loss.early {
		l.wordBy, st.loss.early = l.quiet.Add(wordMost), false
	}
	commits := d.followRestored(ctx, st, st.looked(), l.stamps)
	l.stamps = d.passOwn(ctx, st, l.stamps, commits+d.openNativeMeanwhile(ctx, st, &l.native))
	d.awaitWord(l)
	return l
}

// awaitWord lets the quiet begin only when the kernel has notified of the commit that the
// stamps show, or after wordBy. In the middle of a commit the flusher still writes.
func (d *Daemon) awaitWord(l *iptablesLull) {
	if l.wordBy.IsZero() {
		return
	}
	heard := true
	for _, stamp := range l.stamps {
		heard = heard && d.cfg.Writers.Noted(uint32(stamp.Value))
	}
	now := time.Now()
	l.quiet, l.end = now, now.Add(min(10*d.cfg.Settle, MostSettle))
	if heard || now.After(l.wordBy) {
		l.wordBy = time.Time{}
	}
}

// stamps returns the stamps of the families that have a readable one. A lull compares them to
// notice writes.
func (d *Daemon) stamps(ctx context.Context, st *state) map[rules.Family]iptables.Stamp {
	stamps := map[rules.Family]iptables.Stamp{}
	for f := range st.inOrder() {
		if stamp, err := d.cfg.Kernel.Stamp(ctx, f); err == nil {
			stamps[f] = stamp
		}
	}
	return stamps
}

// wrote reports whether a process other than canaryd wrote since wrote was called last.
// Meanwhile it reads tables that a file replaced, and opens gates of lost tables.
func (d *Daemon) wrote(ctx context.Context, st *state, l *iptablesLull) bool {
	now := d.stamps(ctx, st)
	commits := d.followRestored(ctx, st, l.stamps, now) + d.openNativeMeanwhile(ctx, st, &l.native)
	if maps.Equal(now, l.stamps) {
		d.awaitWord(l)
		return false
	}
	l.stamps = d.passOwn(ctx, st, now, commits)
	return true
}

const (
	// aheadAfter is the part of --settle after which canaryd plans and encodes a replay on nft,
	// during the rest of the wait. At 1,000 services that takes 30 ms.
	aheadAfter = 4
	// aheadMost is the largest number of rules for which canaryd does that. With more rules it
	// takes longer than --settle itself, and is wasted after each of a flusher's commands.
	aheadMost = 20000
)

// plansAhead reports whether a replay can be planned while the flusher may be at work. On
// legacy it cannot: a plan holds the lock, and the flusher's next command would wait for it. If
// rules depend on ipsets it cannot either: flushers destroy ipsets after the rules, which moves
// no stamp.
func (d *Daemon) plansAhead(st *state) bool {
	info := d.cfg.Kernel.Info()
	if !st.heals() || info.Backend != iptables.NFT || len(st.sets.known)+len(st.sets.names) > 0 {
		return false
	}
	count, _ := st.want().Counts()
	return count <= aheadMost
}

// settle waits until the flusher is done. If a replay can be planned meanwhile, it returns a
// function that waits for the rest of the time (Job.Settle); else nil. The function reports
// whether a process wrote.
func (d *Daemon) settle(ctx context.Context, st *state) func(context.Context, reload.Memory) (reload.Memory, bool) {
	if !st.loss.logged {
		if r := &st.native; r.asleep && len(r.tables) > 0 { // a record of the last run may have them, too
			d.lookNative(ctx, st)
		}
		st.resumeRecord()
		d.logNotice(ctx, st)
		if d.seekLockHolder(st); st.loss.lockedBy != "" {
			d.showUnread(st) // at once: the replay may wait long
			d.publish(st)
		}
	}
	l := d.beginLull(ctx, st)
	if !d.plansAhead(st) {
		l.await(ctx, d.cfg.Settle, false)
		d.nameCulprit(ctx, st)
		return nil
	}
	l.await(ctx, d.cfg.Settle/aheadAfter, false)
	return func(ctx context.Context, memory reload.Memory) (reload.Memory, bool) {
		st.loss.memory = memory
		again := time.Now().Before(l.end) && (l.moved() || l.await(ctx, d.cfg.Settle, true))
		if again {
			l.await(ctx, d.cfg.Settle/aheadAfter, false)
		} else {
			d.nameCulprit(ctx, st)
		}
		return st.loss.memory, again
	}
}

// nameCulprit blames the flusher once for each loss, when the wait for it is over: later losses
// are of another flush. A commit takes effect a moment before the kernel's message names its
// author.
func (d *Daemon) nameCulprit(ctx context.Context, st *state) {
	l := st.loss
	if l.quiet(); !l.blamed && !l.known() {
		d.blame(ctx, st, l)
	}
	l.blamed = true
}

// settleNative waits until no process committed for --settle, for ten times that at most. After
// a replay of iptables' tables that is so already. It returns true at once if the flusher takes
// iptables' rules, too, and the standby may have to be opened for them.
func (d *Daemon) settleNative(ctx context.Context, st *state) (iptablesLost bool) {
	genid, err := d.hearNow(ctx, st) // the read that follows meets the same error
	l := d.newLull(st.native.wrote)
	if err != nil || l.quiet.IsZero() {
		l.quiet = time.Now()
	}
	l.wrote = func() bool {
		now, err := d.cfg.Native.Kernel.Genid()
		if err != nil || now == genid {
			return false
		}
		if iptablesLost = st.mayOpenAny(false) && d.iptablesFirst(ctx, st); iptablesLost {
			l.end = time.Time{}
			return true
		}
		own := d.openNativeMeanwhile(ctx, st, &genid)
		for genid = now; own > 0; own-- {
			genid = nft.Following(genid)
		}
		return true
	}
	if l.await(ctx, d.cfg.Settle, false); !iptablesLost {
		st.native.loss.quiet()
	}
	return iptablesLost
}
