package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
)

const aboutDetect = `Prints the rules of each backend, without canaryd's own marks, and the backend that run would watch.
A backend weighs as much as it has rules, and 100 more with kubelet's hint chain. The heavier
backend wins; nft wins a tie. Without any rules run takes the backend whose programs are installed.
Lists native nftables tables with the word of --protect that guards them. Lists unguarded chains of
iptables' tables, and unguarded single rules of built-in chains, with their likely owner and such a
word; of rules the first 200 lines. Uses the running daemon's --protect, or the --protect given
here. Needs no daemon, and writes nothing. Warns of kernels on which canaryd is known not to work,
or was never tried (docs/measured.md#platforms). Exit code: 0, 2 trouble.
`

func (o *options) gatherEvidence(ctx context.Context) (iptables.Evidence, error) {
	return iptables.Choose(ctx, iptables.ChooseConfig{Families: o.families, Canary: o.canaryChain})
}

// runDetect prints the backend in use with its evidence, and the unguarded chains, rules and
// native tables. It needs no daemon, and writes nothing.
func runDetect(ctx context.Context, o *options, to streams) (int, error) {
	evidence, err := o.gatherEvidence(ctx)
	if err != nil {
		return exitError, err
	}
	daemons, err := o.takeDaemonsProtect(ctx)
	if err != nil {
		return exitError, err
	}
	if o.backend != "auto" {
		evidence = evidence.Force(iptables.Backend(o.backend))
	}
	standing, err := native.AllStanding(protect.MayProtectTable)
	if err != nil {
		return exitError, fmt.Errorf("listing native tables: %w", err)
	}
	found := detected{Evidence: evidence, Native: o.nativeFound(standing), Protect: protect.Join(o.protect)}
	if evidence.Total(evidence.Backend).Rules > 0 {
		found.unguardedFound = o.findUnguarded(ctx, evidence.Backend, daemons)
		if ctx.Err() != nil {
			return exitError, ctx.Err()
		}
	}
	for _, t := range found.Native {
		if !t.Guarded && !t.Immune && t.Manager == "" {
			found.NotGuarded.Tables++
		}
	}
	if err := printEvidence(to.out, o.output, found); err != nil {
		return exitError, err
	}
	release, err := kernelRelease()
	if err != nil {
		return exitError, err
	}
	for _, line := range platformWarnings(release, evidence) {
		if _, err := fmt.Fprintln(to.err, "canaryd: warning:", line); err != nil {
			return exitError, err
		}
	}
	return exitOK, nil
}

type detected struct {
	iptables.Evidence
	Native  []foundTable `json:"native,omitempty"`
	Protect string       `json:"protect,omitempty"`
	unguardedFound
}

// A foundTable is a native table in the kernel.
type foundTable struct {
	Table   string `json:"table"`   // with its family
	Guarded bool   `json:"guarded"` // --protect names it, and no process owns it
	Word    string `json:"word"`    // the word of --protect that names it
	Immune  bool   `json:"immune,omitempty"`
	Owner   string `json:"owner,omitempty"`   // by its name
	Manager string `json:"manager,omitempty"` // a firewall manager, by its name
}

// nativeFound returns the existing native tables with their owner, and whether canaryd guards
// them by --protect. A table that one process owns needs no guard.
func (o *options) nativeFound(standing []native.Standing) []foundTable {
	var found []foundTable
	for _, t := range standing {
		owner, _ := owners.OfTable(t.ID)
		found = append(found, foundTable{t.ID.NFT(), o.selector.ProtectsTable(t.ID) && !t.Immune, protect.WordFor(t.ID), t.Immune, owner.Title, owners.ManagerOfTable(t.ID.Name)})
	}
	return found
}

// foundRows returns the rows of a table of native tables, with its heading.
func foundRows(found []foundTable) [][]string {
	rows := [][]string{{"NATIVE TABLE", "GUARDED", "NOTE"}}
	for _, t := range found {
		row := []string{api.TableCell(t.Table), "yes", "by --protect=" + plain(t.Word)}
		switch {
		case t.Immune:
			row[1], row[2] = "immune", "one process owns it, and no other can flush it"
		case !t.Guarded:
			row[1], row[2] = "no", wordWould(t.Word)
			if t.Manager != "" {
				row[2] += "; " + aboutManager(t.Manager)
			} else if t.Owner != "" {
				row[2] += "; " + likely(t.Owner)
			}
		}
		rows = append(rows, row)
	}
	return rows
}

func printEvidence(w io.Writer, output string, e detected) error {
	return show(w, output, e, func(w io.Writer) { writeEvidence(w, e) })
}

// writeEvidence writes detect's answer for people. The backend is last, because a terminal
// shows the end.
func writeEvidence(w io.Writer, e detected) {
	rows := [][]string{{"FAMILY", "BACKEND", "RULES", "HINT", "NOTE"}}
	for f, counts := range api.InOrder(e.Counts) {
		for _, b := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			rows = append(rows, append([]string{f.String(), string(b)}, countCells(counts, b)...))
		}
	}
	writeTable(w, rows)
	if len(e.Native) > 0 {
		fmt.Fprintln(w)
		writeTable(w, foundRows(e.Native))
		guarded := 0
		for _, t := range e.Native {
			if t.Guarded {
				guarded++
			}
		}
		if guarded > protect.MaxNative {
			fmt.Fprintf(w, "canaryd guards %d of these %d; name fewer with --protect\n", protect.MaxNative, guarded)
		}
	}
	writeUnguarded(w, e.unguardedFound)
	mixed := "no"
	if e.Mixed {
		mixed = paint(w, yellow, "yes: both backends hold rules")
	}
	fmt.Fprintf(w, "\nbackend  %s\nreason   %s\nmixed    %s\n", e.Backend, e.Reason, mixed)
}

// countCells returns the cells RULES, HINT and NOTE of a backend. Without a count the kernel
// lacks that backend.
func countCells(counts map[iptables.Backend]iptables.Count, b iptables.Backend) []string {
	count, ok := counts[b]
	switch {
	case !ok:
		return []string{"-", "-", "not in this kernel"}
	case count.Hint:
		return []string{fmt.Sprint(count.Rules), "yes", ""}
	default:
		return []string{fmt.Sprint(count.Rules), "no", ""}
	}
}

const (
	// firstWait is how long run waits while there are no rules yet. At boot, kubelet or
	// kube-proxy may start at the same moment, and canaryd must guard the backend that they
	// use. Meanwhile there are no rules to guard.
	firstWait = 2 * time.Second
	firstLook = 200 * time.Millisecond
)

// awaitEvidence waits up to firstWait while neither backend has rules, so that an owner that
// starts now can decide. It calls none before it waits. It returns early when there is
// evidence, when the evidence cannot be read, or when ctx ends. The caller reports such an
// error.
func awaitEvidence(ctx context.Context, gatherEvidence func(context.Context) (iptables.Evidence, error), none func()) {
	end := time.Now().Add(firstWait)
	for first := true; ; first = false {
		evidence, err := gatherEvidence(ctx)
		if err != nil || !evidence.Empty() || !time.Now().Before(end) {
			return
		}
		if first {
			klog.FromContext(ctx).Info("There are no rules yet; waiting a moment for an owner that shows which backend is in use", "atMost", firstWait)
			none()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(firstLook):
		}
	}
}
