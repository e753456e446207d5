package control

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
)

// TestWatch: the client sees each change, in its order, until the daemon ends.
func TestWatch(t *testing.T) {
	f := &fakeController{gone: make(chan struct{})}
	var paused []bool
	err := control(t, f).Watch(t.Context(), func(s api.Status) error {
		if paused = append(paused, s.Paused); len(paused) == 3 {
			close(f.gone)
		}
		return nil
	})
	if !errors.Is(err, ErrEnded) {
		t.Errorf("the end of the daemon is %v", err)
	}
	if diff := cmp.Diff([]bool{false, true, false}, paused); diff != "" {
		t.Errorf("what was seen (-want +got):\n%s", diff)
	}
}

// TestWatchEnds: other ways in which Watch ends. Each time the daemon's side ends too, as
// goleak checks.
func TestWatchEnds(t *testing.T) {
	enough := errors.New("enough")
	client := control(t, &fakeController{})
	if err := client.Watch(t.Context(), func(api.Status) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("an error of see: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := client.Watch(ctx, func(api.Status) error { cancel(); return nil }); err == nil {
		t.Error("a watch that its client ended returned nil")
	}
	full := control(t, &fakeController{do: func(context.Context) error { return api.ErrTooManyWatchers }})
	var refused *RefusedError
	if err := full.Watch(t.Context(), nil); !errors.As(err, &refused) || refused.Code != 429 || !strings.Contains(err.Error(), "takes no more") {
		t.Errorf("one client too many: %v", err)
	}
	if err := (Client{Socket: t.TempDir() + "/s"}).Watch(t.Context(), nil); !errors.Is(err, ErrNoDaemon) {
		t.Errorf("without a daemon: %v", err)
	}
}
