package daemon

import (
	"context"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Saved rules are read as soon as they are seen, and not only when they are replaced. Once
// another process has flushed them too, the chains that they lacked look like chains that an
// owner has removed since.

// readRestored reads the families where a look saw that saved rules replaced a table.
func (d *Daemon) readRestored(ctx context.Context, st *state) {
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			fs := st.families[f]
			if st.loss != nil && fs != nil && fs.tables[t].verdict == canary.Replaced && st.loss.memory.Finding(f.Table(t)).Restored == "" {
				d.readLost(ctx, st, f)
				break
			}
		}
	}
}

// followRestored reads the replaced tables while canaryd waits for the flusher, because files
// are restored table by table. If a stamp does not show each write, it probes each time, once
// saved rules were seen. If a probe shows that nat is lost, it opens the standby; commits is
// how many commits that took.
func (d *Daemon) followRestored(ctx context.Context, st *state, before, now map[rules.Family]iptables.Stamp) (commits int) {
	for _, f := range rules.Families() {
		moved := now[f] != before[f]
		if !moved && (now[f].Exact || !st.loss.memory.Restored()) {
			continue
		}
		probed, err := d.cfg.Kernel.Probe(ctx, f, st.marks.current.Places(f, d.cfg.Canary))
		if err != nil {
			continue
		}
		verdicts := st.marks.current.Verdicts(f, d.cfg.Canary, probed)
		commits += d.openMeanwhile(ctx, st, f, verdicts)
		for t, v := range verdicts {
			if v == canary.Replaced && (moved || st.loss.memory.Finding(f.Table(t)).Restored == "") {
				d.readLost(ctx, st, f)
				break
			}
		}
	}
	return commits
}

// looked returns the stamps up to which marks were probed: beginLull looks for later writes.
func (st *state) looked() map[rules.Family]iptables.Stamp {
	stamps := map[rules.Family]iptables.Stamp{}
	for f, fs := range st.families {
		stamps[f] = fs.looked.urgent
	}
	return stamps
}

// readLost reads a family that lost something, and remembers the findings for the replay. If it
// cannot be read, the replay fails and logs that.
func (d *Daemon) readLost(ctx context.Context, st *state, f rules.Family) {
	if snapshot, err := d.read(ctx, st, f); err == nil {
		st.loss.remember(f, d.examiner(st).Examine(snapshot, d.job(st, f)))
	}
}
