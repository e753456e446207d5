package reload

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestSavingInSteps: between the steps of a save, the state names the generation before, which can
// be loaded; marks can be saved meanwhile. After the last step the next state names the new one.
func TestSavingInSteps(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	s.wholeBelow = 0 // each generation has a base
	named := func() string {
		t.Helper()
		state, stored, err := openStore(t, dir, here).LoadState()
		must(t, err)
		return state.ID + " " + stored.Generation.ID()
	}
	wants := func(n int) {
		t.Helper()
		id := generation(t, n).ID()
		if d := cmp.Diff(id+" "+id, named()); d != "" {
			t.Errorf("the state names another generation, or has another (-want +got):\n%s", d)
		}
	}
	state := testState()
	must(t, s.saveGeneration(generation(t, 0), "snapshot", noon))
	must(t, s.SaveState(state))
	for n := 1; n < 2*keptGenerations; n++ { // older ones are removed
		write, end := s.BeginSave(Stored{Source: "snapshot", Captured: noon, Generation: generation(t, n)})
		must(t, s.SaveState(state))
		wants(n - 1)
		write()
		must(t, s.SaveState(state))
		wants(n - 1)
		err, bytesErr := end()
		must(t, err)
		must(t, bytesErr)
		must(t, s.SaveState(state))
		wants(n)
	}
}

// TestSavingThatFails: the folder is gone before Run, and is no folder any more. The state names
// the generation before, and a later save makes the folder again.
func TestSavingThatFails(t *testing.T) {
	dir := t.TempDir() + "/state"
	s := openStore(t, dir, here)
	must(t, s.saveGeneration(generation(t, 1), "snapshot", noon))
	write, end := s.BeginSave(Stored{Generation: generation(t, 2)})
	must(t, os.RemoveAll(dir))
	must(t, os.WriteFile(dir, nil, 0o600))
	write()
	if err, _ := end(); err == nil || s.written != generation(t, 1).ID() {
		t.Errorf("%v; the next state would name %s", err, s.written)
	}
	must(t, os.Remove(dir))
	write, end = s.BeginSave(Stored{Generation: generation(t, 3)})
	write()
	err, _ := end()
	must(t, err)
	must(t, s.SaveState(testState()))
	if _, stored, err := openStore(t, dir, here).LoadState(); err != nil || stored.ID != generation(t, 3).ID() {
		t.Errorf("stored: %s, %v", stored.ID, err)
	}
	if s.Remade() == 0 {
		t.Error("the store does not say that the folder was made again")
	}
}
