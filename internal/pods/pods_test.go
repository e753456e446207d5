package pods

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/cniresults"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// files is the content of libcni's folder; nil cannot be read.
type files map[protect.Attachment]cniresults.Pod

func (f files) Read() (cniresults.Reading, error) {
	if f == nil {
		return cniresults.Reading{}, errors.New("no such folder")
	}
	return cniresults.Reading{Folder: "results", Attached: f}, nil
}

func of(names ...string) files {
	f := files{}
	for _, name := range names {
		f[protect.Attachment{Network: "cbr0", Container: name}] = cniresults.Pod{Namespace: "shop", Name: name, Ends: true}
	}
	return f
}

// TestFilesThatGo: the files of two pods disappear, one with rules and one without; these are
// the results of the next reading.
func TestFilesThatGo(t *testing.T) {
	now := time.Unix(1e9, 0)
	for name, test := range map[string]struct {
		then   files
		known  bool // the folder could be read
		gone   bool // the file of a pod with rules is gone
		listed []string
	}{
		"all stay":             {of("ruled", "bare", "other"), true, false, []string{}},
		"one with rules goes":  {of("bare", "other"), true, true, []string{"shop/ruled"}},
		"one without goes":     {of("ruled", "other"), true, false, []string{}},
		"all go at once":       {of(), true, false, []string{}},
		"it cannot be read":    {nil, false, false, []string{}},
		"another one is added": {of("ruled", "bare", "other", "new"), true, false, []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			w := Watch{rules: map[protect.Attachment]bool{{Network: "cbr0", Container: "ruled"}: true}, edition: 1}
			first, _ := w.Read(t.Context(), of("ruled", "bare", "other"), now)
			w.Take(t.Context(), first, now)
			r, known := w.Read(t.Context(), test.then, now.Add(time.Second))
			if known != test.known {
				t.Fatalf("the folder was read: %t, want %t", known, test.known)
			}
			gone := known && w.Take(t.Context(), r, now.Add(time.Second))
			if gone != test.gone {
				t.Errorf("a file of a pod with rules is gone: %t, want %t", gone, test.gone)
			}
			names := append([]string{}, w.Names(w.Gone())...)
			if diff := cmp.Diff(test.listed, names); diff != "" {
				t.Errorf("the gone (-want +got):\n%s", diff)
			}
			if !w.RemoveAt.IsZero() {
				t.Error("rules are removed that no replay has put back")
			}
		})
	}
}

// TestHowLongRulesMayBeMissing: rules that a process other than the owner removed are lost
// after the jump grace. Rules that an unknown process removed are lost after the time of a DEL.
// Rules that the owner removed are not lost.
func TestHowLongRulesMayBeMissing(t *testing.T) {
	since, pod := time.Unix(1e9, 0), protect.Attachment{Network: "cbr0", Container: "a"}
	for by, want := range map[robber]time.Duration{robberOther: 10 * time.Second, robberUnknown: DelLasts, robberOwner: 0} {
		w := Watch{Grace: 10 * time.Second, known: map[protect.Attachment]attached{pod: {Pod: cniresults.Pod{Ends: true}}},
			robbed: map[robberyKey]Robbery{{rules.IPv4, pod}: {Since: since, by: by}}}
		nat := rules.IPv4.Table(rules.Nat)
		lost := func(after time.Duration) bool { return len(w.LostSince(nat, since.Add(after))) > 0 }
		if lost(want-time.Second) || lost(want) != (want > 0) {
			t.Errorf("by %d: not lost after %s, or before", by, want)
		}
		kept := slices.Collect(maps.Keys(w.RobbedNow(since.Add(time.Hour))))
		if (len(kept) > 0) != (want > 0) {
			t.Errorf("by %d: after an hour families with lost rules: %v", by, kept)
		}
	}
}
