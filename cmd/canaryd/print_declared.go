package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
)

// refusedText names the refused declared rules, each with the operator's file and line.
func refusedText(list []api.Refused) string {
	var text strings.Builder
	for _, r := range list {
		what := plain(cmp.Or(r.Rule, "the table as a whole"))
		fmt.Fprintf(&text, "declared, but refused: %s %s %s: %s: %s (%s)\n",
			r.Family, r.Table, plain(r.Chain), plain(cmp.Or(r.Where, "-")), what, plain(oneLine(cmp.Or(r.Reason, r.Meaning))))
	}
	return text.String()
}

// sourceErrorsText says what is wrong with the files of declared sources.
func sourceErrorsText(list []api.SourceError) string {
	var text strings.Builder
	for _, e := range list {
		what := map[api.Instead]string{
			api.LastGood:   "what it said before stays in force",
			api.StoredGood: "what it said to an earlier run stays in force",
			api.NoneGood:   "NOTHING of it is in force",
			api.AllButThis: "the rest of the file counts",
		}[e.InForce]
		fmt.Fprintf(&text, "error in %s: %s; %s, since %s\n", e.Source, plain(oneLine(cmp.Or(e.Reason, e.Where))), what, ago(e.Since))
	}
	return text.String()
}
