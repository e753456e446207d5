package canary

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// TestWhatWasLostBeforeIsLost: a flush leaves a table's chains, and a chain is missing. Its
// owner removed it, unless an earlier read already found it lost.
func TestWhatWasLostBeforeIsLost(t *testing.T) {
	const older = "KUBE-SVC-OLDER77777777777"
	file := []edit{deleted(svc, sep), replaced("0123456789abcdef", "aaaaaaaaaaaaaaaa"), with(":"+older+" - [0:0]", "-A "+older+" -j KUBE-MARK-MASQ")}
	tests := []struct {
		name     string
		earlier  [][]edit // reads of the same loss
		now      []edit
		lost     []string
		released []string
		brought  []string
	}{
		{
			name: "a flush alone", now: []edit{deleted(sep), flushed()}, released: []string{sep},
		},
		{
			name: "saved rules that lacked it, then a flush", earlier: [][]edit{file}, now: append(slices.Clone(file), flushed()),
			lost: []string{sep, svc}, brought: []string{older},
		},
		{
			name: "and an owner fills what only they had", earlier: [][]edit{file}, now: append(slices.Clone(file), flushed(), with("-A "+older+" -j RETURN")),
			lost: []string{sep, svc},
		},
		{
			name: "and its owner removes what they had", earlier: [][]edit{file}, now: append(slices.Clone(file), deleted("KUBE-NODEPORTS", older), flushed()),
			lost: []string{sep, svc}, released: []string{"KUBE-NODEPORTS"},
		},
		{
			name: "and that was seen, too", earlier: [][]edit{file, append(slices.Clone(file), deleted("KUBE-NODEPORTS"))}, now: append(slices.Clone(file), deleted("KUBE-NODEPORTS"), flushed()),
			lost: []string{sep, svc}, released: []string{"KUBE-NODEPORTS"}, brought: []string{older},
		},
		{
			name: "another file that lacks more", earlier: [][]edit{file, append(slices.Clone(file), deleted("KUBE-NODEPORTS"), replaced("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"))}, now: append(slices.Clone(file), deleted("KUBE-NODEPORTS"), flushed()),
			lost: []string{"KUBE-NODEPORTS", sep, svc}, brought: []string{older},
		},
		{
			name: "all chains deleted, then saved rules that were not seen, then a flush", earlier: [][]edit{{deleted(chains...), deleted(DefaultChain)}}, now: append(slices.Clone(file), flushed()),
			lost: []string{sep, svc},
		},
		{
			name: "a flush and one more", earlier: [][]edit{{deleted(sep), flushed()}}, now: []edit{deleted(sep), flushed()}, released: []string{sep},
		},
		{
			name: "it stood again in between", earlier: [][]edit{file, {flushed()}}, now: []edit{deleted(sep), flushed()}, released: []string{sep},
		},
		{
			name: "all was well in between", earlier: [][]edit{file, {}}, now: []edit{deleted(sep), flushed()}, released: []string{sep},
		},
	}
	for _, test := range tests {
		want := wantedOf(t, node)
		var before Finding
		read := func(edits []edit) Finding {
			text := node
			for _, e := range edits {
				text = e(text)
			}
			seen := seenTable(tableOf(t, text))
			seen.Before = before
			return Judge(want, seen)
		}
		for _, edits := range test.earlier {
			before = read(edits)
		}
		got := read(test.now)
		if got.Verdict != Emptied {
			t.Errorf("%s: %s", test.name, got.Verdict)
		}
		if d := cmp.Diff([][]string{test.lost, test.released, test.brought}, [][]string{got.Missing, got.Released, got.Brought}, cmpopts.EquateEmpty()); d != "" {
			t.Errorf("%s: lost, released and brought (-want +got):\n%s", test.name, d)
		}
	}
}

// TestSavedRulesOfAnotherTime: a restore of saved rules brings back removed chains.
func TestSavedRulesOfAnotherTime(t *testing.T) {
	text := with(":KUBE-SVC-OLDER77777777777 - [0:0]")(replaced("0123456789abcdef", "aaaaaaaaaaaaaaaa")(node))
	got := Judge(wantedOf(t, node), seenTable(tableOf(t, text)))
	if d := cmp.Diff([]string{"KUBE-SVC-OLDER77777777777"}, got.Brought); d != "" || got.Restored != `-m comment --comment "canaryd-canary:aaaaaaaaaaaaaaaa"` || got.Verdict != Replaced {
		t.Errorf("%s, restored %q, brought (-want +got):\n%s", got.Verdict, got.Restored, d)
	}
}
