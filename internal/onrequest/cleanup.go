package onrequest

import (
	"context"
	"errors"

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

// ErrWhoseRules: a cleanup is to remove rules, and no word says whose. The owners that auto finds
// may be more than an operator thinks of.
var ErrWhoseRules = errors.New("--rules removes rules of all owners that --protect=auto finds: name those whose rules are to go, such as --protect=kube,cni, or --protect=auto for all")

// RemoveAll removes canaryd's marks, and with everything what it protects, and
// returns nil only if a read shows that they are gone.
func RemoveAll(ctx context.Context, replayer reload.Replayer, job reload.Job, everything bool) error {
	result, err := replayer.Remove(ctx, job, everything)
	for _, fr := range result {
		err = errors.Join(err, fr.Err)
	}
	return err
}
