package reload

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// FuzzStored: the files of the state folder have any content. A generation that is loaded matches
// its name, and everything else is an error.
func FuzzStored(f *testing.F) {
	f.Add([]byte(`{"format":7,"identity":{"bootID":"boot-1","netns":"4026531840","backend":"nft","iptables":"1.8.9"},"id":"0123456789ab"}`))
	f.Add([]byte(`{"format":0}`))
	f.Add([]byte(`{"format":1,"confirmed":"2026-11-20T10:00:00Z","id":"e3b0c44298fc","captured":"2026-11-20T10:00:00Z","rules":0,"chains":0,"generation":{}}`))
	f.Add([]byte(`{"generation":{"ipv4":{"nat":{"Chains":[{"Name":"KUBE-SVC-A","Rules":[{"Spec":"-j RETURN"}]}]}}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		s := openStore(t, dir, here)
		const id = "0123456789ab"
		for _, path := range []string{s.path(id), s.statePath(), s.ownersPath(), filepath.Join(dir, "pending.json"), filepath.Join(dir, "sets.json"), s.baselinePath()} {
			must(t, os.WriteFile(path, text, 0o600))
		}
		if stored, err := s.Load(id); err == nil && stored.Generation.ID() != id {
			t.Errorf("loaded as %s, its content is %s", id, stored.Generation.ID())
		}
		if _, stored, err := s.LoadState(); err == nil && stored.Generation.ID() != stored.ID {
			t.Errorf("the state's generation is %s, its content is %s", stored.ID, stored.Generation.ID())
		}
		if b, err := s.LoadBaseline(); err == nil && b.Generation.ID() != b.ID {
			t.Errorf("the baseline is %s, its content is %s", b.ID, b.Generation.ID())
		}
		_, _, _ = s.Show(id)
		_, _ = s.LoadPending()
		_, _ = s.Remains(time.Time{})
		_ = s.List()
		_ = s.Offer()
		_ = LastBackend(dir, here)
	})
}
