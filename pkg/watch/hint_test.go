package watch

import (
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestManyHintsAreOneLook(t *testing.T) {
	h := NewHints()
	var givers sync.WaitGroup
	for _, s := range []Source{SourceNFT, SourceLock, SourceNFT, SourcePoll} {
		givers.Go(func() { h.Give(s) })
	}
	givers.Wait()
	select {
	case <-h.C():
	default:
		t.Fatal("hints were given, and nobody was told to look")
	}
	select {
	case <-h.C():
		t.Fatal("told to look twice")
	default:
	}
	want := map[Source]uint64{SourceNFT: 2, SourceLock: 1, SourcePoll: 1, SourceMiss: 0, SourceOverflow: 0}
	if diff := cmp.Diff(want, h.Counts()); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
}

func TestHintOfNoKnownSourceIsALookAllTheSame(t *testing.T) {
	h := NewHints()
	h.Give("rumour")
	<-h.C()
	if n := len(h.Counts()); n != len(Sources()) {
		t.Errorf("%d sources are counted, want %d", n, len(Sources()))
	}
}
