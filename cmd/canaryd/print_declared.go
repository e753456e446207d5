package main

import (
	"cmp"
	"fmt"
	"io"

	"github.com/canaryd/canaryd/internal/daemon"
)

// printRefused names the declared rules that are refused, each with the operator's
// own file and line.
func printRefused(w io.Writer, list []daemon.Refused) error {
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
