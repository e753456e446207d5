package culprit

import (
	"path"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/watch"
)

const (
	// holderWindow is how long before the first evidence of a loss the culprit may have held
	// the xtables lock.
	holderWindow = time.Second
	// holderLate is how much later than the loss canaryd may hear that a holder released the
	// lock, although both begin with the same close.
	holderLate = 5 * time.Millisecond
)

// Newest returns the newer of genid, the read that found the loss, and the last commit that the
// kernel reported. blame looks for culprits up to there (Charge.Upto), before the loss is read
// under guard.
func (q Inquiry) Newest(genid uint32) uint32 {
	if n := len(q.Takings.List); n > 0 {
		genid = Later(genid, q.Takings.List[n-1].Commit.Genid)
	}
	return genid
}

// AddWriters puts into a record the processes that wrote, or held the lock, during the loss,
// which b bounds. It weighs the culprits by the rules that they removed from the tables that
// were hit.
func (q Inquiry) AddWriters(r *api.Flush, b Bounds, hit flushes.Verdicts) {
	var list []watch.Writer
	if q.Legacy {
		list = q.holders(b)
	} else {
		list = q.Writers.Between(b.Intact, b.Heard)
	}
	r.Writers = nil
	for i, w := range list {
		list[i] = q.named(w)
	}
	for _, w := range lastOf(list) {
		if q.Own(w.PID) {
			continue
		}
		r.Writers = append(r.Writers, api.CulpritOf(w))
		if q.Legacy && !onlyReads(w.Command) {
			// The kernel does not report the writes of a holder.
			flushes.AddCulprit(r, api.CulpritOf(w))
			r.CulpritsLikely = true
		}
	}
	q.weigh(r, b.Intact, hit)
}

// weigh sets Took of each culprit: the number of rules that it deleted in the lost tables
// (hit). It counts commits after genid intact, the last intact look. AddWriters calls it, and
// the record names the culprit with the most deletions first. On legacy the kernel reports no
// deletions, so Took is 0.
func (q Inquiry) weigh(r *api.Flush, intact uint32, hit flushes.Verdicts) {
	for i := range r.Culprits {
		c := &r.Culprits[i]
		c.Took = 0
		for _, k := range q.Takings.List {
			if k.Commit.PID == c.PID && !k.Commit.Own && hit[k.Family.Table(k.Table)] != "" && nft.Newer(k.Commit.Genid, intact) {
				c.Took += k.Count
			}
		}
	}
}

// onlyReads reports whether a command line is an iptables command that takes the lock and
// changes nothing, such as kube-proxy's look for its canary. Such a holder is no culprit. An
// unknown command ("") may have written.
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

// holders returns the processes that held the lock shortly before the loss was noticed, each
// once. A process that released the lock before canaryd last held it, for the previous replay,
// removed nothing since then.
func (q Inquiry) holders(b Bounds) []watch.Writer {
	first := pace.Latest(b.First.Add(-holderWindow), b.Written)
	list := slices.DeleteFunc(q.Writers.Holders(time.Time{}), func(w watch.Writer) bool { return w.Time.After(b.Noticed.Add(holderLate)) })
	return slices.DeleteFunc(lastOf(list), func(w watch.Writer) bool { return w.Time.Before(first) && !w.Opened })
}

// lastOf keeps the last message about each process. A process that opens the lock is named
// twice; the last process that closed it wrote last.
func lastOf(writers []watch.Writer) []watch.Writer {
	var last []watch.Writer
	for i, w := range writers {
		if !slices.ContainsFunc(writers[i+1:], func(later watch.Writer) bool { return later.PID == w.PID }) {
			last = append(last, w)
		}
	}
	return last
}

// Later returns the newer of two genids.
func Later(a, b uint32) uint32 {
	if nft.Newer(b, a) {
		return b
	}
	return a
}
