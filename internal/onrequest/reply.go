package onrequest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// notIn returns the rules, with their chains, that a baseline does not have; none without a
// baseline. jumps must be grouped by chain. A preview marks them.
func notIn(base *baseline.Base, id rules.TableID, jumps []rules.Jump) []rules.Jump {
	if base == nil {
		return nil
	}
	var list []rules.Jump
	for i := 0; i < len(jumps); {
		chain, n := jumps[i].Chain, i
		var of []rules.Rule
		for ; n < len(jumps) && jumps[n].Chain == chain; n++ {
			of = append(of, jumps[n].Rule)
		}
		for _, r := range base.Lacks(id, chain, of) {
			list = append(list, rules.Jump{Chain: chain, Rule: r})
		}
		i = n
	}
	return list
}

// ReplyOf returns a replay's result as a reply. A table that could not be read is not proved,
// regardless of the results for other tables.
func ReplyOf(generation string, result reload.Result) api.RestoreReply {
	reply := api.RestoreReply{Generation: generation, Outcomes: map[rules.Family]api.Outcome{}}
	for f, fr := range result {
		reply.Outcomes[f] = fr.Outcome
		if fr.Err != nil {
			reply.Detail = fr.Err.Error()
		}
		for t, tr := range fr.Tables {
			if tr.Finding.Verdict == canary.Unknown && tr.Finding.Err != nil && fr.Outcome.Done() {
				reply.Outcomes[f] = reload.Partial
				reply.Detail = fmt.Sprintf("%s %s could not be read: %v", f, t, tr.Finding.Err)
			}
		}
	}
	return reply
}

// LogRestored logs a restore that an operator requested, with the generation of before (undo).
// values are further fields.
func LogRestored(ctx context.Context, reply api.RestoreReply, values ...any) {
	values = append([]any{"generation", reply.Generation}, values...)
	if reply.Undo != "" {
		values = append(values, "undo", reply.Undo)
	}
	log, says := severity.Notices(klog.FromContext(ctx)), "Restored on request"
	failed := slices.ContainsFunc(reply.Native, func(n api.NativeRestored) bool { return n.Outcome == reload.Failed })
	for _, outcome := range reply.Outcomes {
		failed = failed || outcome == reload.Failed
	}
	if failed {
		log, says = severity.Warnings(klog.FromContext(ctx)), "A restore on request has failed"
	}
	log.Info(says, values...)
}

// RenderFamilies returns a generation as iptables-restore input, of one family or, if only is
// 0, of all.
func RenderFamilies(g rules.Generation, only rules.Family) string {
	text := ""
	for _, f := range rules.Families() {
		if f == only || only == 0 {
			text += rules.Render(g, f)
		}
	}
	return text
}

// Heading is a comment before a stored generation in the output of canaryd render, with the
// time when it was learned. note is why it must not be restored here; "" if it may.
func Heading(generation string, learned time.Time, note string) string {
	text := fmt.Sprintf("# generation %s, learned %s\n", generation, learned.UTC().Format(time.RFC3339))
	if note != "" {
		text += "# canaryd does not restore it here: " + strings.ReplaceAll(note, "\n", " ") + "\n"
	}
	return text
}

// A TableRemover deletes empty tables: *iptables.Kernel or *iptablestest.Fake.
type TableRemover interface {
	// RemoveEmpty deletes an empty table, and reports whether it did.
	RemoveEmpty(context.Context, rules.Family, rules.TableName) (bool, error)
}

// RemoveMade deletes the tables that canaryd made, if they are empty, and logs them. A table
// that another process uses stays.
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

// ErrWhoseRules means that a cleanup is to remove rules without naming their owners. auto may
// find more owners than an operator expects.
var ErrWhoseRules = errors.New("--rules removes rules of all owners that --protect=auto finds: name those whose rules are to go, such as --protect=kube,cni, or --protect=auto for all")

// RemoveAll removes canaryd's marks, and with everything also the protected rules. It returns
// nil only if a read shows that they are gone.
func RemoveAll(ctx context.Context, replayer reload.Replayer, job reload.Job, everything bool) error {
	result, err := replayer.Remove(ctx, job, everything)
	for _, fr := range result {
		err = errors.Join(err, fr.Err)
	}
	return err
}
