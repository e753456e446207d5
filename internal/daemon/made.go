package daemon

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A TableRemover deletes empty tables: *iptables.Kernel or *iptablestest.Fake.
type TableRemover interface {
	// RemoveEmpty deletes a table that nothing is in, and reports whether it did.
	RemoveEmpty(context.Context, rules.Family, rules.TableName) (bool, error)
}

// addMade notes which tables a write of ours made: they did not exist when it was planned.
func (st *state) addMade(f rules.Family, fr reload.FamilyResult) {
	for t, tr := range fr.Tables {
		if tr.Seen == nil && !tr.Absent && tr.Proved {
			st.marks.madeTables = st.marks.madeTables.With(f, t)
		}
	}
}

// RemoveMade deletes those of the tables that canaryd made in which nothing is any more, and
// logs which these are. A table that another process uses stays.
func RemoveMade(ctx context.Context, kernel TableRemover, made reload.Tables) {
	log := klog.FromContext(ctx)
	for _, f := range rules.Families() {
		for _, t := range made[f] {
			removed, err := kernel.RemoveEmpty(ctx, f, t)
			switch {
			case err != nil:
				severity.Warnings(log).Error(err, "A table that canaryd had made could not be deleted; it is empty and does no harm", "family", f, "table", t)
			case removed:
				log.Info("Deleted a table that canaryd had made and that is empty", "family", f, "table", t)
			}
		}
	}
}
