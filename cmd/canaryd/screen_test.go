package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

var colours = regexp.MustCompile("\x1b\\[[0-9]+m")

// TestScreen: a terminal shows the same text as any other output, in the same columns, with
// colours.
func TestScreen(t *testing.T) {
	s := status()
	for _, output := range []string{"table", "json"} {
		var plain, shown bytes.Buffer
		if err := printStatus(&plain, output, s); err != nil {
			t.Fatal(err)
		}
		if err := printStatus(screen{Writer: &shown}, output, s); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(plain.String(), colours.ReplaceAllString(shown.String(), "")); diff != "" {
			t.Errorf("%s without its colours (-want +got):\n%s", output, diff)
		}
		if coloured := colours.MatchString(shown.String()); coloured != (output == "table") {
			t.Errorf("%s, coloured: %t\n%s", output, coloured, shown.String())
		}
	}
}

// TestColours: intact tables are green, unknown ones yellow, and lost ones red. A past loss has
// no colour.
func TestColours(t *testing.T) {
	var out bytes.Buffer
	err := printVerdicts(screen{Writer: &out}, "table", api.Status{Families: map[rules.Family]api.Verdicts{
		rules.IPv4: {rules.Mangle: canary.Intact, rules.Nat: canary.Emptied, rules.Filter: canary.Unknown},
		rules.IPv6: {rules.Mangle: canary.Changed, rules.Nat: canary.JumpsMissing, rules.Filter: canary.Partial},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		"<1>FAMILY<0>  <1>TABLE<0>   <1>VERDICT<0>",
		"ipv4    mangle  <32>intact<0>",
		"ipv4    nat     <31>emptied<0>",
		"ipv4    filter  <33>unknown<0>",
		"ipv6    mangle  changed",
		"ipv6    nat     <31>jumps_missing<0>",
		"ipv6    filter  <31>partial<0>",
		"<31>NOT healthy: ipv4 nat is emptied, ipv6 nat is jumps_missing; rules were lost and could not be put back: ipv6 filter is partial<0>",
		"",
	}, "\n")
	got := regexp.MustCompile("\x1b\\[([0-9]+)m").ReplaceAllString(out.String(), "<$1>")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for heading, cell := range map[string]string{"KIND": "emptied", "BY": "proved", "TABLES": "intact"} {
		if c := colourOf(heading, cell); c != normal {
			t.Errorf("%q below %s has the colour %d", cell, heading, c)
		}
	}
}

// TestAtWork: a slow command reports each second that it works, in a line that disappears
// before any other output. A command that ends within a second reports nothing.
func TestAtWork(t *testing.T) {
	for _, test := range []struct {
		takes time.Duration
		want  string
	}{
		{900 * time.Millisecond, "done\n"},
		{2500 * time.Millisecond, "\r\x1b[Kcanaryd restore: 1s\r" + "\r\x1b[Kcanaryd restore: 2s\r" + "\r\x1b[K" + "done\n"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var shown bytes.Buffer // one terminal for both
			done := atWork(t.Context(), &shown, "restore")
			to := streams{out: screen{Writer: &shown}, err: &shown}.behind(done)
			time.Sleep(test.takes)
			if paint(to.out, red, "x") == "x" {
				t.Error("what is behind a screen is no screen")
			}
			for _, text := range []string{"do", "ne\n"} {
				if n, err := to.out.Write([]byte(text)); err != nil || n != len(text) {
					t.Errorf("%d, %v", n, err)
				}
			}
			time.Sleep(10 * time.Second)
			done()
			if diff := cmp.Diff(test.want, shown.String()); diff != "" {
				t.Errorf("after %s (-want +got):\n%s", test.takes, diff)
			}
		})
	}
}
