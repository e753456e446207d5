package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/protect"
)

// nativeRows returns the rows of a table of native tables, with its heading.
func nativeRows(native []api.NativeTable) [][]string {
	rows := [][]string{{"NATIVE TABLE", "VERDICT", "CHAINS", "RULES", "ELEMENTS"}}
	for _, t := range native {
		if t.Immune {
			rows = append(rows, []string{api.TableCell(t.Table), "immune"})
			continue
		}
		rows = append(rows, append([]string{api.TableCell(t.Table), string(t.Verdict)}, t.CountCells(strconv.Itoa)...))
	}
	return rows
}

// nativeText lists further facts about native tables for canaryd status: losses, and
// parts that could not be put back.
func nativeText(s api.Status) string {
	text := ""
	for _, t := range s.Native {
		if t.Verdict.Loss() {
			text += fmt.Sprintf("table %s is %s: %s\n", api.TableCell(t.Table), t.Verdict, plain(t.Why))
			if t.Awaiting {
				end := "it is not put back unasked: canaryd restore puts it back"
				if t.LeftOut {
					end = "only its owner can put it back"
				}
				text += "  " + end + ", canaryd dismiss accepts the loss\n"
			}
		}
		if t.Unreplayable != "" {
			text += fmt.Sprintf("not put back if it is lost: %s\n", plain(oneLine(t.Unreplayable)))
		}
	}
	text += witnessText(s.Native)
	if s.NativeOverLimit > 0 {
		text += fmt.Sprintf("NOT guarded: %s; canaryd guards at most %d and prefers tables that --protect names one by one, so name fewer\n", count(s.NativeOverLimit, "native table"), protect.MaxNative)
	}
	for _, l := range s.NativeLeftOut {
		text += fmt.Sprintf("NOT guarded: %s; there are more in native tables than canaryd keeps (--max-rules)\n", l)
	}
	return text
}

// witnessText names the families without a witness, or with a witness of an unusual name; "" if
// each has the usual one.
func witnessText(tables []api.NativeTable) (text string) {
	said := map[string]bool{}
	for _, t := range tables {
		switch {
		case t.Immune || t.Verdict == canary.Unknown || said[t.Family]:
			continue
		case t.Witness == "":
			text += fmt.Sprintf("family %s has no witness: canaryd may take a flush of the ruleset for the owner's doing\n", t.Family)
		case t.Witness != native.WitnessName:
			text += fmt.Sprintf("the witness of family %s is table %s: another process has the name %s\n", t.Family, plain(t.Witness), native.WitnessName)
		}
		said[t.Family] = true
	}
	return text
}

// writeNativeStored lists the generations of native tables on disk, for render and restore.
func writeNativeStored(w io.Writer, s api.Status) {
	if len(s.NativeStored) == 0 {
		return
	}
	rows := [][]string{{"STORED NATIVE TABLE", "GENERATION", "LEARNED", "CHAINS", "RULES", "ELEMENTS", "MADE BY"}}
	for _, g := range s.NativeStored {
		made := madeText(g.Made, g.Foreign)
		if g.Foreign == "" && slices.ContainsFunc(s.Native, func(t api.NativeTable) bool { return t.Table == g.Table && t.Generation == g.ID }) {
			made += "; the present one"
		}
		rows = append(rows, []string{api.TableCell(g.Table), g.ID, ago(g.Captured), strconv.Itoa(g.Chains), strconv.Itoa(g.Rules), strconv.Itoa(g.Elements), made})
	}
	fmt.Fprintln(w)
	writeTable(w, rows)
}

// writeRestored describes the results of a restore for requested native tables, below
// everything else. what is the heading of their content. marked: it counts the rules that the
// baseline lacks.
func writeRestored(w io.Writer, tables []api.NativeRestored, what string, marked bool) {
	if len(tables) == 0 {
		return
	}
	rows := [][]string{{"NATIVE TABLE", what, "OUTCOME"}}
	if marked {
		rows[0] = append(rows[0], notInBaseline)
	}
	for _, t := range tables {
		content := "-"
		if !t.Unread {
			content = count(t.Chains, "chain") + ", " + count(t.Rules, "rule") + ", " + count(t.Elements, "element")
		}
		outcome := string(t.Outcome)
		if t.Detail != "" {
			outcome += ": " + plain(oneLine(t.Detail))
		}
		row := []string{api.TableCell(t.Table), content, outcome}
		if marked {
			row = append(row, count(t.NotInBaseline, "rule"))
		}
		rows = append(rows, row)
	}
	fmt.Fprintln(w)
	writeTable(w, rows)
}
