package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
)

const aboutDismiss = `Accepts a loss, and makes the present rules the generation. A node is not healthy after a loss that
canaryd does not put back unasked: rules lost while canaryd did not run, or a native table that was
deleted alone or made dormant. Nor is it while lost rules could not be put back. Rules that waited
behind such a rule are put back without it, as soon as canaryd may write. The command also accepts
policies of built-in chains that have become DROP: status and metrics no longer show them. The
stored generation stays on disk.
Exit code: 0 also if nothing waited for a decision, 2 no daemon or trouble.
`

// runDismiss accepts all losses that wait for a decision, through the daemon; none is no error.
func runDismiss(ctx context.Context, o *options, to streams) (int, error) {
	reply, err := o.client().Dismiss(ctx)
	if err != nil {
		return exitError, err
	}
	return exitOK, show(to.out, o.output, reply, func(w io.Writer) { fmt.Fprintln(w, dismissalText(reply)) })
}

// dismissalText names the accepted losses, a line for each kind.
func dismissalText(reply api.DismissReply) string {
	var what []string
	if reply.Generation != "" {
		what = append(what, fmt.Sprintf("the loss of flush %s is accepted: %s; generation %s stays on disk", reply.Flush, count(reply.Rules, "rule"), reply.Generation))
	}
	for _, table := range reply.Native {
		what = append(what, fmt.Sprintf("native table %s is accepted as it is now", plain(table)))
	}
	if n := reply.Unread; n > 0 {
		what = append(what, fmt.Sprintf("the stored rules cannot be read (%s): the present rules are accepted", count(n, "file")))
	}
	for _, chain := range reply.Policies {
		what = append(what, fmt.Sprintf("the policy DROP of %s is accepted", chain))
	}
	if n := reply.Quarantined; n > 0 {
		what = append(what, fmt.Sprintf("%s that could not be put back: the loss is accepted", count(n, "rule")))
	}
	if n := reply.Waiting; n > 0 {
		what = append(what, fmt.Sprintf("%s that waited: put back as soon as canaryd may write", count(n, "rule")))
	}
	return cmp.Or(strings.Join(what, "\n"), "nothing waits for a decision")
}

// awaiting adds the tables with a loss that still waits for a decision to the verdicts of a
// read without a daemon. The last daemon stored that loss. A table that has its rules again is
// left out.
func (b bench) awaiting(snapshot iptables.Snapshot, verdicts api.Verdicts) {
	pending, err := b.store.LoadPending()
	if err != nil {
		return // none waits, or the next daemon reports the error
	}
	var record api.Flush
	if err := json.Unmarshal(pending.Record, &record); err != nil {
		return
	}
	lost, err := b.store.LoadHere(pending.ID)
	for _, t := range record.Lost.Tables {
		back := err == nil && canary.Covers(lost.Generation[t.Family.Table(t.Table)], snapshot.Tables[t.Table])
		if t.Family == snapshot.Family && t.Rules > 0 && !back && !verdicts[t.Table].Loss() {
			verdicts[t.Table] = t.Kind
		}
	}
}
