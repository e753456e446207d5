package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// A detectRow names the backend that has a node's rules.
type detectRow struct {
	Node     string           `json:"node"`
	Answered bool             `json:"answered"`
	Why      string           `json:"why,omitempty"` // why there is no answer
	Backend  iptables.Backend `json:"backend,omitempty"`
	Reason   string           `json:"reason,omitempty"`
	Mixed    bool             `json:"mixed"` // both hold rules
	NFT      int              `json:"nftRules"`
	Legacy   int              `json:"legacyRules"`
	Native   int              `json:"nativeTables"`
	// Unguarded and Single count the unguarded chains and single rules, without those of
	// firewall managers. canaryd detect lists them on the node, with the words to guard them.
	Unguarded int    `json:"unguardedChains"`
	Single    int    `json:"unguardedRules"`
	Unknown   bool   `json:"unguardedUnknown,omitempty"` // some tables could not be read
	Warning   string `json:"warning,omitempty"`          // of the kernel or the programs
}

type detectReply struct {
	Nodes      []detectRow `json:"nodes"`
	Unanswered int         `json:"unanswered"`
	WithoutPod int         `json:"withoutPod,omitempty"`
}

// runDetect prints the backend and the counts of unguarded rules of each node. The code is
// exitNo if a node has rules in both backends, exitError if one is silent.
func runDetect(ctx context.Context, o *options, to streams) (int, error) {
	f, err := o.open(ctx, to)
	if err != nil {
		return exitError, err
	}
	reply, mixed := detectReply{Nodes: []detectRow{}, WithoutPod: f.without}, 0
	askAll(ctx, f, to, func(ctx context.Context, n node) (detectRow, error) {
		return detectRowOf(n, f.exec(ctx, n, mostStatus, "detect", "-o", "json"))
	}, func(n node, row detectRow, err error) {
		if err != nil {
			row = detectRow{Node: n.name, Why: cell(err.Error())}
			reply.Unanswered++
		}
		if row.Mixed {
			mixed++
		}
		reply.Nodes = append(reply.Nodes, row)
	})
	slices.SortFunc(reply.Nodes, func(a, b detectRow) int {
		return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.Node, b.Node))
	})
	code := exitOK
	switch {
	case reply.Unanswered+reply.WithoutPod > 0:
		code = exitError
	case mixed > 0:
		code = exitNo
	}
	return code, show(to.out, o.output, reply, func(w io.Writer) { writeDetected(w, reply, mixed) })
}

// detectRowOf reads the answer to canaryd detect -o json. An answer without a backend, or with
// an exit code, is an error: the node is then silent.
func detectRowOf(n node, a answer) (detectRow, error) {
	if err := a.failed(); err != nil {
		return detectRow{}, err
	}
	var found struct {
		iptables.Evidence
		Native           []struct{ Table string }
		NotGuarded       *api.Unguarded // nil: this canaryd is older than these counts
		UnguardedUnknown []string
	}
	if err := read(a.out, &found); err != nil {
		return detectRow{}, err
	}
	if found.Backend != iptables.NFT && found.Backend != iptables.Legacy {
		return detectRow{}, fmt.Errorf("the answer names no backend")
	}
	if !strings.HasPrefix(a.said, "canaryd: warning:") { // kubectl has warnings of its own
		a.said = ""
	}
	counts, unknown := api.Unguarded{}, len(found.UnguardedUnknown) > 0 || found.NotGuarded == nil
	if found.NotGuarded != nil {
		counts = *found.NotGuarded
	}
	return detectRow{
		Node: n.name, Answered: true, Backend: found.Backend, Reason: cell(found.Reason), Mixed: found.Mixed,
		NFT: found.Total(iptables.NFT).Rules, Legacy: found.Total(iptables.Legacy).Rules, Native: len(found.Native),
		Unguarded: counts.Chains, Single: counts.Rules, Unknown: unknown, Warning: cell(a.said),
	}, nil
}

// rank is the row's place: mixed backends first, then silent nodes, then warnings.
func (r detectRow) rank() int {
	switch {
	case r.Mixed:
		return 0
	case !r.Answered:
		return 1
	case r.Warning != "":
		return 2
	default:
		return 3
	}
}

// counted returns a count of unguarded chains or rules, or unknown if a table was not read.
func (r detectRow) counted(n int) string {
	if r.Unknown {
		return "unknown"
	}
	return strconv.Itoa(n)
}

// writeDetected writes the rows and then the sum for people. mixed is the number of nodes with
// rules in both backends.
func writeDetected(w io.Writer, r detectReply, mixed int) {
	rows := [][]string{{"NODE", "BACKEND", "MIXED", "NFT RULES", "LEGACY RULES", "NATIVE TABLES", "UNGUARDED CHAINS", "SINGLE RULES", "WHY"}}
	for _, n := range r.Nodes {
		row := []string{cell(n.Node), "unknown", "", "", "", "", "", "", n.Why}
		if n.Answered {
			row = []string{cell(n.Node), string(n.Backend), "no", strconv.Itoa(n.NFT), strconv.Itoa(n.Legacy), strconv.Itoa(n.Native), n.counted(n.Unguarded), n.counted(n.Single), cmp.Or(n.Warning, n.Reason)}
		}
		if n.Mixed {
			row[2] = "yes"
		}
		rows = append(rows, row)
	}
	terminal.Table(w, rows, func(heading, cell string) terminal.Colour {
		if heading == "MIXED" && cell == "yes" || heading == "BACKEND" && cell == "unknown" {
			return terminal.Yellow
		}
		return terminal.Normal
	})
	text := fmt.Sprintf("%s: %d with rules in both backends", count(len(r.Nodes), "node"), mixed)
	if r.Unanswered > 0 {
		text += fmt.Sprintf("; %d gave no answer", r.Unanswered)
	}
	fmt.Fprintf(w, "\n%s%s\n", text, withoutText(r.WithoutPod))
}
