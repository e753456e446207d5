package reload

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// full returns a generation of so many rules in one chain.
func full(t *testing.T, n int) rules.Generation {
	t.Helper()
	lines := []string{":KUBE-SVC-A - [0:0]"}
	for range n {
		lines = append(lines, "-A KUBE-SVC-A -j RETURN")
	}
	return rules.Generation{v4.Table(rules.Nat): sectionOf(t, rules.Nat, lines...)}
}

// saveAt stores a generation as if at that minute.
func (s *Store) saveAt(t *testing.T, minute int, stored Stored) string {
	t.Helper()
	must(t, s.Save(stored))
	at := noon.Add(time.Duration(minute) * time.Minute)
	must(t, os.Chtimes(s.path(s.written), at, at))
	return s.written
}

// TestListSaysWhatIsInside: without reading rules, the list shows each generation's size and
// origin, and whether it may be restored here.
func TestListSaysWhatIsInside(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	elsewhere := here
	elsewhere.BootID = "boot-0"
	old := openStore(t, dir, elsewhere).saveAt(t, 0, Stored{Generation: full(t, 500), Source: "snapshot", Captured: noon})
	whole := s.saveAt(t, 1, Stored{Generation: full(t, 50), Source: "snapshot", Made: MadeByOwners, Captured: noon})
	// The end of the file is cut off: a list needs none of the rules.
	text, err := os.ReadFile(s.path(whole))
	must(t, err)
	must(t, os.WriteFile(s.path(whole), text[:strings.Index(string(text), `"generation"`)+14], 0o600))
	must(t, os.Chtimes(s.path(whole), noon, noon.Add(time.Minute)))
	empty := s.saveAt(t, 2, Stored{Generation: full(t, 4), Source: "snapshot", Made: MadeAtStart, Captured: noon.Add(time.Minute)})
	before := s.saveAt(t, 3, Stored{Generation: full(t, 5), Source: "snapshot"})
	text, err = os.ReadFile(s.path(before))
	must(t, err)
	must(t, os.WriteFile(s.path(before), []byte(strings.Replace(string(text), `"format":7`, `"format":2`, 1)), 0o600))
	at := noon.Add(3 * time.Minute)
	must(t, os.Chtimes(s.path(before), at, at))

	foreign := `the stored generation was made elsewhere: boot "boot-0", here "boot-1"`
	want := []Kept{
		{ID: before, Saved: at, Source: "snapshot"},
		{ID: empty, Saved: noon.Add(2 * time.Minute), Captured: noon.Add(time.Minute), Source: "snapshot", Made: MadeAtStart, Counted: true, Rules: 4, Chains: 1, Sparse: true},
		{ID: whole, Saved: noon.Add(time.Minute), Captured: noon, Source: "snapshot", Made: MadeByOwners, Counted: true, Rules: 50, Chains: 1},
		{ID: old, Saved: noon, Captured: noon, Source: "snapshot", Counted: true, Rules: 500, Chains: 1, Foreign: foreign},
	}
	for range 2 { // the second time from memory
		if d := cmp.Diff(want, s.List()); d != "" {
			t.Errorf("list (-want +got):\n%s", d)
		}
	}
	want = []Kept{want[0], want[2], want[1], want[3]}
	if d := cmp.Diff(want, Offered(s.List())); d != "" {
		t.Errorf("offered (-want +got):\n%s", d)
	}
	if got, want := s.Offer(), "there are "+before+", "+whole+", "+empty+" (nearly empty)"; got != want {
		t.Errorf("offer %q, want %q", got, want)
	}
}

// TestShow: any stored generation is shown, with the reason why it must not be restored here.
func TestShow(t *testing.T) {
	dir := t.TempDir()
	elsewhere := here
	elsewhere.Backend = "legacy"
	g := full(t, 3)
	must(t, openStore(t, dir, elsewhere).saveGeneration(g, "snapshot", noon))
	s := openStore(t, dir, here)
	stored, note, err := s.Show(g.ID())
	must(t, err)
	if stored.Generation.ID() != g.ID() || !strings.Contains(note, `backend "legacy", here "nft"`) {
		t.Errorf("shown with the note %q: %v", note, stored.Generation)
	}
	if _, err := s.Load(g.ID()); !errors.Is(err, ErrForeign) {
		t.Errorf("load: %v, want %v", err, ErrForeign)
	}
	must(t, s.saveGeneration(g, "snapshot", noon))
	if _, note, err := s.Show(g.ID()); err != nil || note != "" {
		t.Errorf("%q, %v", note, err)
	}
	for _, id := range []string{"0123456789ab", "../state", ""} {
		if _, _, err := s.Show(id); !errors.Is(err, ErrNothingStored) {
			t.Errorf("%q: %v", id, err)
		}
	}
	must(t, os.WriteFile(s.path("0123456789ab"), must1(os.ReadFile(s.path(g.ID()))), 0o600))
	if _, _, err := s.Show("0123456789ab"); err == nil || !strings.Contains(err.Error(), "corrupt") {
		t.Errorf("a file under another name: %v", err)
	}
}

func must1(text []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return text
}
