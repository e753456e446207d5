package main

import (
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
)

// standbysText says the standby's state of each family and native table in one line, with an empty
// one behind it. Where there is none anywhere, and none is needed, there is no line.
func standbysText(standby map[rules.Family]api.FamilyStandby, tables []api.NativeTable) string {
	var words []string
	none := true
	for f, s := range api.InOrder(standby) {
		words = append(words, f.String()+" "+standbyText(s))
		none = none && isNone(s)
	}
	for _, t := range tables {
		if t.Standby != nil {
			words = append(words, "table "+api.TableCell(t.Table)+" "+standbyText(*t.Standby))
			none = none && isNone(*t.Standby)
		}
	}
	if none {
		return "\n"
	}
	return "standby " + strings.Join(words, ", ") + "\n\n"
}

// isNone reports whether there is no standby, and not for want of something.
func isNone(s api.FamilyStandby) bool {
	return s.State == api.StandbyOff || s.State == api.StandbyIdle
}

func standbyText(s api.FamilyStandby) string {
	var more []string
	if s.Reason != "" {
		more = append(more, plain(oneLine(s.Reason)))
	}
	if !s.OpenSince.IsZero() {
		more = append(more, "since "+ago(s.OpenSince))
	}
	if s.Outstanding > 0 {
		more = append(more, count(s.Outstanding, "changed chain")+" outstanding")
	}
	if s.Uncopied > 0 {
		more = append(more, fmt.Sprintf("%d of %d chains not copied", s.Uncopied, s.Chains))
	}
	text := string(s.State)
	if len(more) > 0 {
		text += " (" + strings.Join(more, "; ") + ")"
	}
	return text
}
