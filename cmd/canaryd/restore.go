package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A restorer carries out a request to restore: the daemon, or this process without one.
type restorer func(context.Context, api.RestoreRequest) (api.RestoreReply, error)

// runRestore replays now, through the daemon if one runs, else by itself (bench.restore).
func runRestore(ctx context.Context, o *options, to streams) (int, error) {
	code, err := o.restoreBy(ctx, to, o.client().Restore)
	if !errors.Is(err, control.ErrNoDaemon) {
		return code, err
	}
	return withBench(ctx, o, func(b bench) (int, error) { return o.restoreBy(ctx, to, b.restore) })
}

// restoreBy restores through restore (the daemon's, or bench.restore), and prints the result.
// --yes agrees to the removals of a dry run right before. If another process writes in between
// and the restore would remove more, it removes nothing.
func (o *options) restoreBy(ctx context.Context, to streams, restore restorer) (int, error) {
	request := api.RestoreRequest{Generation: o.generation, DryRun: o.dryRun}
	if o.yes && !o.dryRun {
		preview, err := restore(ctx, api.RestoreRequest{Generation: o.generation, DryRun: true})
		if err != nil {
			return exitError, err
		}
		request.Agreed = preview.Agreement()
	}
	reply, err := restore(ctx, request)
	if err != nil {
		return exitError, err
	}
	if o.dryRun {
		return exitOK, printPreview(to.out, o.output, reply)
	}
	code, err := printReply(to.out, o.output, reply)
	if err != nil || reply.Refused == "" {
		return code, err
	}
	return exitError, o.refusal(reply)
}

// refusal explains why a restore wrote only a part, or nothing, and names the remedy. It is the
// error of canaryd restore.
func (o *options) refusal(reply api.RestoreReply) error {
	if len(reply.Outcomes) > 0 {
		return fmt.Errorf("not everything was written, because another process wrote meanwhile: %s; look at it with --dry-run", reply.Refused)
	}
	n := reply.Removes()
	what := fmt.Sprintf("nothing was written: it would remove %s and %s", count(n.Rules, "protected rule"), count(n.Chains, "chain"))
	if n.Elements > 0 {
		what = fmt.Sprintf("nothing was written: it would remove %s, %s and %s", count(n.Rules, "protected rule"), count(n.Chains, "chain"), count(n.Elements, "element"))
	}
	if o.yes {
		return errors.New(what + ", others than a moment ago, because another process wrote meanwhile; run it again")
	}
	return errors.New(what + "; --dry-run shows them, --yes agrees to that")
}

// restore replays a stored generation without a daemon, and saves the marks that it planted. It
// has the form of the daemon's answer, for restoreBy.
func (b bench) restore(ctx context.Context, r api.RestoreRequest) (api.RestoreReply, error) {
	base, name := b.baseline()
	if reply, found, err := b.returnNative(ctx, r, base); found || err != nil {
		reply.Baseline = name
		return reply, err
	}
	state, stored, err := b.store.LoadState()
	undo := ""
	if err == nil { // else the generation cannot be read
		undo = state.ID
	}
	if r.Generation != "" {
		stored, err = b.store.Load(r.Generation)
		stored.Made = reload.MadeRestored
	}
	if err != nil {
		return api.RestoreReply{}, fmt.Errorf("there is nothing to replay, and no daemon is running: %w", err)
	}
	job := b.job(stored.Generation, state.Marks)
	if job.Sets, err = b.store.LoadSets(); err != nil {
		return api.RestoreReply{}, err
	}
	reply, result, err := onrequest.Restore(ctx, b.replayer(), r.Generation != "", job, r, base)
	reply.Baseline = name
	if err == nil && reply.Refused == "" && r.Generation == "" { // generations have iptables' rules only
		var failed error
		if reply.Native, failed = b.restoreNative(r.DryRun, base); failed != nil { // the result for iptables' tables is reported anyway
			reply.Native = append(reply.Native, api.NativeRestored{Table: "native tables", Outcome: reload.Failed, Detail: failed.Error()})
		}
	}
	if result == nil {
		return reply, err
	}
	for f, fr := range result {
		for t, tr := range fr.Tables {
			state.Marks = state.Marks.With(f.Table(t), tr.Mark)
		}
	}
	if reply.Proved() {
		state.Confirmed, state.Uptime = time.Now(), here.Uptime()
	}
	if undo != stored.ID {
		reply.Undo = undo
	}
	if r.Generation != "" && reply.Refused == "" && reply.Proved() { // like the daemon, it decides about broken files
		err = errors.Join(err, b.dropUnread(func(u reload.Unread) bool { return !u.Native }))
	}
	return reply, errors.Join(err, b.store.Save(stored),
		b.store.SaveState(reload.State{Confirmed: state.Confirmed, Uptime: state.Uptime, Marks: state.Marks, MadeTables: state.MadeTables}),
		b.store.SaveBytes(stored.Generation), onrequest.KeepRemoval(ctx, b.o.stateDir, reply, result))
}

// dropUnread removes decided files from the list of stored files that cannot be read.
func (b bench) dropUnread(decided func(reload.Unread) bool) error {
	return b.store.SaveUnread(slices.DeleteFunc(b.store.LoadUnread(here.BootedAt(here.Uptime())), decided))
}

// baseline returns the confirmed baseline and its name; both are nil without one. If its file
// is unusable, the name has the error, and the reply says that no rule is marked.
func (b bench) baseline() (*baseline.Base, *api.BaselineName) {
	known := baseline.Of(b.store.LoadBaseline())
	return known.Base, known.Name()
}

func printPreview(w io.Writer, output string, reply api.RestoreReply) error {
	return show(w, output, reply, func(w io.Writer) { writePreview(w, reply) })
}

// writePreview writes a dry run for people: the counts of each table, then the lines. The first
// NewLines of a table are rules that the baseline lacks.
func writePreview(w io.Writer, reply api.RestoreReply) {
	writeTableChanges(w, reply, "WOULD ADD", "WOULD REMOVE")
	writeRestored(w, reply.Native, "WOULD PUT BACK", marked(reply))
	for _, c := range reply.Changes {
		fmt.Fprintf(w, "\n@@ %s @@\n", c.Name())
		for i, line := range c.Lines {
			if i < c.NewLines {
				line = "not in the baseline: " + line
			}
			fmt.Fprintln(w, plain(line))
		}
		if c.More > 0 {
			fmt.Fprintf(w, "@@ %s not shown @@\n", count(c.More, "more line"))
		}
	}
}

// writeTableChanges writes how many rules each table gains and loses, under the headings adds
// and removes. With a usable baseline a column counts the rules that it lacks.
func writeTableChanges(w io.Writer, reply api.RestoreReply, adds, removes string) {
	heading := []string{"FAMILY", "TABLE", adds, removes}
	if marked(reply) {
		heading = append(heading, notInBaseline)
	}
	rows := [][]string{heading}
	for _, c := range reply.Changes {
		removed := countsText(c.Removes)
		if c.Reorders > 0 {
			removed += fmt.Sprintf(" (another order in %s)", count(c.Reorders, "chain"))
		}
		family, table, _ := strings.Cut(c.Name(), " ")
		row := []string{family, table, countsText(c.Adds), removed}
		if marked(reply) {
			row = append(row, count(c.NotInBaseline, "rule"))
		}
		rows = append(rows, row)
	}
	if len(rows) == 1 {
		rows = [][]string{{"no protected rule of iptables changes"}}
	}
	if b := reply.Baseline; b != nil && b.Error != "" && len(reply.Changes) > 0 {
		fmt.Fprintf(w, "no rule is marked, because the confirmed baseline is unusable: %s\n", plain(oneLine(b.Error)))
	}
	writeTable(w, rows)
	if reply.Detail != "" && len(reply.Outcomes) == 0 {
		fmt.Fprintln(w, plain(oneLine(reply.Detail)))
	}
}

// notInBaseline heads the column of rules that the baseline lacks.
const notInBaseline = "NOT IN THE BASELINE"

// marked reports whether there is a usable baseline to compare with.
func marked(reply api.RestoreReply) bool {
	return reply.Baseline != nil && reply.Baseline.Generation != ""
}

// countsText counts rules, chains and elements; "nothing" if all are 0.
func countsText(c api.Counts) string {
	if c == (api.Counts{}) {
		return "nothing"
	}
	text := count(c.Rules, "rule") + ", " + count(c.Chains, "chain")
	if c.Elements > 0 {
		text += ", " + count(c.Elements, "element")
	}
	return text
}

// printReply prints what a restore did, in the format of -o (output). The exit code is exitNo
// unless all of it is proved. restoreBy exits with exitError after a refusal.
func printReply(w io.Writer, output string, reply api.RestoreReply) (int, error) {
	err := show(w, output, reply, func(w io.Writer) { writeOutcomes(w, reply) })
	if !reply.Proved() {
		return exitNo, err
	}
	return exitOK, err
}

// writeOutcomes writes the result of a restore for people. After a refusal that wrote nothing
// it shows the changes that were refused.
func writeOutcomes(w io.Writer, reply api.RestoreReply) {
	if reply.Refused != "" && len(reply.Outcomes) == 0 {
		writeTableChanges(w, reply, "WOULD ADD", "WOULD REMOVE")
		return
	}
	rows := [][]string{{"FAMILY", "GENERATION", "OUTCOME"}}
	for f, outcome := range api.InOrder(reply.Outcomes) {
		rows = append(rows, []string{f.String(), reply.Generation, outcomeText(outcome)})
	}
	if len(rows) > 1 || len(reply.Native) == 0 {
		writeTable(w, rows)
	}
	if reply.Detail != "" {
		fmt.Fprintln(w, plain(oneLine(reply.Detail)))
	}
	writeRestored(w, reply.Native, "PUT BACK", false)
	if len(reply.Changes) == 0 {
		return
	}
	fmt.Fprintln(w)
	writeTableChanges(w, reply, "ADDED", "REMOVED")
	if reply.Undo != "" {
		fmt.Fprintf(w, "the generation of before: canaryd restore --generation %s\n", reply.Undo)
	}
}

// outcomeText words the outcome of a restore for people: skipped means that nothing was
// missing.
func outcomeText(o api.Outcome) string {
	if o == reload.Skipped {
		return "nothing was missing"
	}
	return string(o)
}
