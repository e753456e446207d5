package main

import (
	"cmp"
	"fmt"
	"io"

	"github.com/canaryd/canaryd/internal/api"
)

// printRefused prints the refused declared rules, each with the operator's file and line.
func printRefused(w io.Writer, list []api.Refused) error {
	for _, r := range list {
		what := plain(cmp.Or(r.Rule, "the table as a whole"))
		_, err := fmt.Fprintf(w, "declared, but refused: %s %s %s: %s: %s (%s)\n",
			r.Family, r.Table, plain(r.Chain), plain(cmp.Or(r.Where, "-")), what, plain(oneLine(cmp.Or(r.Reason, r.Meaning))))
		if err != nil {
			return err
		}
	}
	return nil
}

// printSourceErrors prints what is wrong with the files of declared sources.
func printSourceErrors(w io.Writer, list []api.SourceError) error {
	for _, e := range list {
		what := map[api.Instead]string{
			api.LastGood:   "what it said before stays in force",
			api.StoredGood: "what it said to an earlier run stays in force",
			api.NoneGood:   "NOTHING of it is in force",
			api.AllButThis: "the rest of the file counts",
		}[e.InForce]
		_, err := fmt.Fprintf(w, "error in %s: %s; %s, since %s\n", e.Source, plain(oneLine(cmp.Or(e.Reason, e.Where))), what, ago(e.Since))
		if err != nil {
			return err
		}
	}
	return nil
}
