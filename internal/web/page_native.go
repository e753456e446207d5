package web

import (
	"fmt"

	"github.com/canaryd/canaryd/internal/api"
)

// nativeWarnings returns the warnings about native tables.
func nativeWarnings(s api.Status) []pageWarning {
	var list []pageWarning
	awaiting := pageWarning{Name: "native-awaiting", Class: "bad", Title: "Native tables are lost and not put back unasked.",
		Text: "Their owner may have meant it.", Choices: []api.Choice{
			{If: "the tables are to come back", Command: "canaryd restore"}, {If: "their owner meant it", Command: "canaryd dismiss"}}}
	refused := pageWarning{Name: "native-refused", Class: "bad", Title: "Native tables could not be put back.",
		Text: "The kernel would not take them again if they were lost. Why:", Command: "canaryd status"}
	for _, t := range s.Native {
		if t.Awaiting {
			awaiting.Chains = append(awaiting.Chains, t.Table)
		}
		if t.Unreplayable != "" {
			refused.Chains = append(refused.Chains, t.Table)
		}
	}
	for _, w := range []pageWarning{awaiting, refused} {
		if len(w.Chains) > 0 {
			list = append(list, w)
		}
	}
	if n := s.NativeBeyond; n > 0 {
		list = append(list, pageWarning{Name: "native-beyond", Class: "bad", Title: fmt.Sprintf("%d more native tables are not guarded.", n),
			Text: "There are more than canaryd guards; name fewer with --protect. Which there are:", Command: "canaryd detect"})
	}
	return list
}

// onlyAwaiting reports whether all that is lost are native tables that wait for a decision.
func onlyAwaiting(s api.Status, lost []loser) bool {
	waiting := 0
	for _, t := range s.Native {
		if t.Awaiting && t.Verdict.Loss() {
			waiting++
		}
	}
	return waiting > 0 && waiting == len(lost)
}
