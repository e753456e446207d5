package daemon

import (
	"context"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

const (
	// holderWindow is how long before the first evidence of a loss a holder
	// of the xtables lock may have done it.
	holderWindow = time.Second
	// holderLate is how much later than the loss it may be heard of that a
	// holder let go of the lock: both begin with the same close.
	holderLate = 5 * time.Millisecond
)

// blame names the likely culprits, as far as they are known before the loss is read under
// guard. It runs after the wait for the flusher, because a commit is visible to a probe a moment
// before the watcher has read its message. recordLosses finds out what the record says in the
// end.
func (d *Daemon) blame(ctx context.Context, st *state, l *loss) {
	q := d.inquire(ctx)
	q.purge = st.purges.current(time.Now())
	l.record.Culprits, l.record.CulpritsMissed, l.record.CulpritsLikely = nil, false, false
	for id, ts := range st.tables() {
		if finding := st.suspected(l, id, ts.verdict); finding.Verdict.Loss() {
			by, missed := q.answer(d.charge(st, id, finding, uint64(q.newest(l.heard))))
			flushes.Accuse(&l.record, by)
			l.record.CulpritsMissed = l.record.CulpritsMissed || missed
		}
	}
	l.addWriters(q)
	flushes.SettleCulprit(&l.record)
}

// suspected returns what is known to be lost of a table: what a read found, or else what a
// probe of its marks showed.
func (st *state) suspected(l *loss, id rules.TableID, v canary.Verdict) canary.Finding {
	finding := l.memory.Finding(id)
	if finding.Verdict.Loss() || !v.Loss() {
		return finding
	}
	finding = canary.Finding{Verdict: v, MarkLost: v != canary.JumpsMissing && v != canary.Drifted}
	if v == canary.JumpsMissing {
		finding.Witnesses = st.marks.current[id].Witnessed
	}
	return finding
}

// newest returns the last genid that is known of.
func (q inquiry) newest(genid uint32) uint32 {
	if n := len(q.takings.List); n > 0 {
		genid = later(genid, q.takings.List[n-1].Commit.Genid)
	}
	return genid
}

// addWriters puts into the record which processes wrote, or held the lock, while the loss
// came about.
func (l *loss) addWriters(q inquiry) {
	var list []watch.Writer
	if q.legacy {
		list = q.holders(l)
	} else {
		list = q.writers.Between(l.intact, l.heard)
	}
	l.record.Writers = nil
	for i, w := range list {
		list[i] = q.named(w)
	}
	for _, w := range lastOf(list) {
		if q.own(w.PID) {
			continue
		}
		l.record.Writers = append(l.record.Writers, api.CulpritOf(w))
		if q.legacy && !onlyReads(w.Command) {
			// The kernel does not say what a holder did.
			flushes.AddCulprit(&l.record, api.CulpritOf(w))
			l.record.CulpritsLikely = true
		}
	}
	q.weigh(l)
}

// weigh counts the rules that each culprit deleted in the tables of the record, where the kernel
// says so.
func (q inquiry) weigh(l *loss) {
	for i := range l.record.Culprits {
		c := &l.record.Culprits[i]
		c.Took = 0
		for _, k := range q.takings.List {
			if k.Commit.PID == c.PID && !k.Commit.Own && l.hit[k.Family.Table(k.Table)] != "" && nft.Newer(k.Commit.Genid, l.intact) {
				c.Took += k.Count
			}
		}
	}
}

// onlyReads reports whether a command line is one of iptables' that takes the lock and
// changes nothing, as kube-proxy's look for its canary.
func onlyReads(command string) bool {
	words := strings.Fields(command)
	if len(words) == 0 {
		return false
	}
	switch program := path.Base(words[0]); {
	case strings.HasSuffix(program, "tables-save"), strings.HasSuffix(program, "tables-legacy-save"):
		return true
	case !strings.HasSuffix(program, "tables") && !strings.HasSuffix(program, "tables-legacy"):
		return false
	}
	return slices.ContainsFunc(words[1:], func(w string) bool {
		return slices.Contains([]string{"-C", "--check", "-L", "--list", "-S", "--list-rules"}, w)
	})
}

// holders returns the processes that held the lock shortly before the loss was noticed, each once.
// One that let go of it before canaryd held it last, for the replay before, took nothing since.
func (q inquiry) holders(l *loss) []watch.Writer {
	first := pace.Latest(l.record.Time.Add(-holderWindow), l.window)
	list := slices.DeleteFunc(q.writers.Holders(time.Time{}), func(w watch.Writer) bool { return w.Time.After(l.noticed.Add(holderLate)) })
	return slices.DeleteFunc(lastOf(list), func(w watch.Writer) bool { return w.Time.Before(first) && !w.Opened })
}

// lastOf keeps the last message about each process. A process that opens the lock is named
// twice, and the one that closed it last wrote last.
func lastOf(writers []watch.Writer) []watch.Writer {
	var last []watch.Writer
	for i, w := range writers {
		if !slices.ContainsFunc(writers[i+1:], func(later watch.Writer) bool { return later.PID == w.PID }) {
			last = append(last, w)
		}
	}
	return last
}

// later returns the newer of two genids.
func later(a, b uint32) uint32 {
	if nft.Newer(b, a) {
		return b
	}
	return a
}
