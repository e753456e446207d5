package iptables

import (
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

func mustParseScripts(t testing.TB, text string) Scripts {
	t.Helper()
	scripts, err := ParseScripts(text)
	if err != nil {
		t.Fatal(err)
	}
	return scripts
}

// write passes a text to a session's Restore as the payload of one family.
func write(t testing.TB, s Session, family rules.Family, text string) (raced bool, err error) {
	t.Helper()
	written := s.Restore(t.Context(), Payload{family: mustParseScripts(t, text)})
	if len(written) != 1 {
		t.Fatalf("a Restore of one family answers for %v", written)
	}
	return written[family].Raced, written[family].Err
}
