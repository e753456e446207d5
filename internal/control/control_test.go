package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/sample"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A fakeController notes its requests.
type fakeController struct {
	mu    sync.Mutex
	asked []string
	do    func(context.Context) error // nil: succeed
	gone  chan struct{}               // ends Watch; nil: never
}

func (f *fakeController) note(ctx context.Context, format string, args ...any) error {
	f.mu.Lock()
	f.asked = append(f.asked, fmt.Sprintf(format, args...))
	f.mu.Unlock()
	if f.do == nil {
		return nil
	}
	return f.do(ctx)
}

func (f *fakeController) Status() api.Status { return sample.Status() }
func (f *fakeController) Watch(ctx context.Context, see func(api.Status) error) error {
	if err := f.note(ctx, "watch"); err != nil {
		return err
	}
	for n := range 3 {
		s := sample.Status()
		s.Paused = n == 1
		if err := see(s); err != nil {
			return err
		}
	}
	select {
	case <-f.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *fakeController) Alive() error { return errors.New("the loop has not turned for 12s") }

func (f *fakeController) Look(ctx context.Context) (api.Status, error) {
	return sample.Status(), f.note(ctx, "look")
}

func (f *fakeController) Restore(ctx context.Context, r api.RestoreRequest) (api.RestoreReply, error) {
	err := f.note(ctx, "restore %q", r.Generation)
	return api.RestoreReply{Generation: "g1", Outcomes: map[rules.Family]api.Outcome{rules.IPv6: reload.Proved}}, err
}

func (f *fakeController) Cleanup(ctx context.Context, r api.CleanupRequest) error {
	return f.note(ctx, "cleanup %v", r.Rules)
}

func (f *fakeController) Pause(ctx context.Context, r api.PauseRequest) (api.PauseReply, error) {
	return api.PauseReply{WasPaused: true, Until: time.Unix(int64(r.Seconds), 0).UTC()}, f.note(ctx, "pause %g", r.Seconds)
}

func (f *fakeController) Flush(ctx context.Context, r api.FlushRequest) (api.FlushReply, error) {
	diff := api.TableDiff{Family: rules.IPv4, Table: rules.Nat, Lines: []string{"--A KUBE-SERVICES -j SECRET"}, More: 7}
	return api.FlushReply{Flush: sample.Status().Flushes[0], Diff: []api.TableDiff{diff}}, f.note(ctx, "flush %q", r.Name)
}

func (f *fakeController) Resume(ctx context.Context) (api.PauseReply, error) {
	return api.PauseReply{WasPaused: true}, f.note(ctx, "resume")
}

func (f *fakeController) Dismiss(ctx context.Context) (api.DismissReply, error) {
	return api.DismissReply{Flush: "f1", Generation: "g1", Rules: 7}, f.note(ctx, "dismiss")
}

func (f *fakeController) Drill(ctx context.Context, r api.DrillRequest) (api.DrillReply, error) {
	return api.DrillReply{Table: r.Table, Log: []string{"l1"}}, f.note(ctx, "drill %v", r)
}

func (f *fakeController) Baseline(ctx context.Context, r api.BaselineRequest) (api.BaselineReply, error) {
	return api.BaselineReply{Present: api.Generation{ID: "g1"}, More: 7}, f.note(ctx, "baseline %v", r)
}

func (f *fakeController) Render(ctx context.Context, r api.RenderRequest) (string, error) {
	return "*nat\nCOMMIT\n", f.note(ctx, "render %q for %s", r.Generation, r.Family)
}

// control serves c on a socket until the test ends.
func control(t *testing.T, c Controller) Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "run", "s")
	l, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- Serve(ctx, l, NewHandler(c)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is still there: %v", err)
		}
	})
	return Client{Socket: path}
}

func TestControl(t *testing.T) {
	f := new(fakeController)
	client := control(t, f)
	ctx := t.Context()

	status, err := client.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample.Status(), status); diff != "" {
		t.Errorf("the socket shows the status in full (-want +got):\n%s", diff)
	}
	if text, err := client.Ready(ctx); err != nil || text != "ok, but kube-proxy's rules have no owner" {
		t.Errorf("got %q, %v", text, err)
	}
	var refused *RefusedError
	if _, err := client.Alive(ctx); !errors.As(err, &refused) || refused.Message != "the loop has not turned for 12s" {
		t.Errorf("got %v", err)
	}
	if _, err := client.Look(ctx); err != nil {
		t.Error(err)
	}
	reply, err := client.Restore(ctx, api.RestoreRequest{Generation: "g1"})
	if err != nil || !reply.Proved() {
		t.Errorf("got %+v, %v", reply, err)
	}
	if err := client.Cleanup(ctx, api.CleanupRequest{Rules: true}); err != nil {
		t.Error(err)
	}
	if reply, err := client.Pause(ctx, api.PauseRequest{Seconds: 90.5}); err != nil || !reply.WasPaused || !reply.Until.Equal(time.Unix(90, 0)) {
		t.Errorf("got %+v, %v", reply, err)
	}
	if reply, err := client.Resume(ctx); err != nil || !reply.WasPaused || !reply.Until.IsZero() {
		t.Errorf("got %+v, %v", reply, err)
	}
	if reply, err := client.Dismiss(ctx); err != nil || !cmp.Equal(reply, api.DismissReply{Flush: "f1", Generation: "g1", Rules: 7}) {
		t.Errorf("got %+v, %v", reply, err)
	}
	if reply, err := client.Drill(ctx, api.DrillRequest{Table: rules.Nat}); err != nil || reply.Table != rules.Nat || len(reply.Log) != 1 {
		t.Errorf("got %+v, %v", reply, err)
	}
	for _, request := range []api.BaselineRequest{{}, {Confirm: true, Generation: "a&b"}, {Forget: true}} {
		if reply, err := client.Baseline(ctx, request); err != nil || reply.Present.ID != "g1" || reply.More != 7 {
			t.Errorf("got %+v, %v", reply, err)
		}
	}
	for _, request := range []api.RenderRequest{{}, {Generation: "a&b", Family: rules.IPv6}} {
		if text, err := client.Render(ctx, request); err != nil || text != "*nat\nCOMMIT\n" {
			t.Errorf("got %q, %v", text, err)
		}
	}
	for _, name := range []string{"1", "a&b"} {
		want, _ := new(fakeController).Flush(ctx, api.FlushRequest{})
		got, err := client.Flush(ctx, api.FlushRequest{Name: name})
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v; one flush, in full (-want +got):\n%s", err, diff)
		}
	}
	want := []string{"look", `restore "g1"`, "cleanup true", "pause 90.5", "resume", "dismiss", "drill {nat  false}", "baseline {false  false}", "baseline {true a&b false}", "baseline {false  true}", `render "" for family 0`, `render "a&b" for ipv6`, `flush "1"`, `flush "a&b"`}
	if diff := cmp.Diff(want, f.asked); diff != "" {
		t.Errorf("the controller was asked (-want +got):\n%s", diff)
	}
}

func TestControlFailures(t *testing.T) {
	f := &fakeController{do: func(context.Context) error { return errors.New("the loop is busy") }}
	client := control(t, f)
	_, err := client.Look(t.Context())
	var refused *RefusedError
	if !errors.As(err, &refused) || refused.Code != 500 || err.Error() != "the loop is busy" || errors.Is(err, api.ErrNoGeneration) {
		t.Errorf("got %v", err)
	}
	f.do = func(context.Context) error { return fmt.Errorf("%w: g9", api.ErrNoGeneration) }
	if _, err := client.Restore(t.Context(), api.RestoreRequest{}); !errors.Is(err, api.ErrNoGeneration) {
		t.Errorf("got %v, want %v", err, api.ErrNoGeneration)
	}
	f.do = func(context.Context) error { return fmt.Errorf("%w: 7", api.ErrNoFlush) }
	if _, err := client.Flush(t.Context(), api.FlushRequest{Name: "7"}); !errors.Is(err, api.ErrNoFlush) || errors.Is(err, api.ErrNoGeneration) {
		t.Errorf("got %v, want %v", err, api.ErrNoFlush)
	}
	if _, err := client.do(t.Context(), "GET", "/v9/status", nil); !errors.As(err, &refused) || refused.Code != 404 || errors.Is(err, api.ErrNoGeneration) {
		t.Errorf("an unknown path: got %v", err)
	}
}

func TestControlRefusesBadRequests(t *testing.T) {
	tests := []struct{ name, method, path, body, want string }{
		{"an unknown field", "POST", "/v1/cleanup", `{"rulez":true}`, `unknown field "rulez"`},
		{"no JSON", "POST", "/v1/restore", `generation=1`, "invalid character"},
		{"a wrong type", "POST", "/v1/cleanup", `{"rules":"yes"}`, "cannot unmarshal string"},
		{"half an object", "POST", "/v1/restore", `{"generation":`, "unexpected EOF"},
		{"two objects", "POST", "/v1/restore", `{}{}`, "something follows"},
		{"a field where none is known", "POST", "/v1/look", `{"now":true}`, "unknown field"},
		{"too long", "POST", "/v1/restore", `{"generation":"` + strings.Repeat("a", maxRequest) + `"}`, "too large"},
		{"a family that is none", "GET", "/v1/generation?family=ipv5", "", "neither ipv4 nor ipv6"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := new(fakeController)
			w := httptest.NewRecorder()
			NewHandler(f).ServeHTTP(w, httptest.NewRequest(tt.method, tt.path, strings.NewReader(tt.body)))
			if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), strings.ReplaceAll(tt.want, `"`, `\"`)) {
				t.Errorf("got %d %s, want 400 and %q", w.Code, w.Body, tt.want)
			}
			if len(f.asked) != 0 {
				t.Errorf("the controller was asked all the same: %q", f.asked)
			}
		})
	}
	for _, path := range []string{"/v1/look", "/v1/restore", "/v1/dismiss", "/v1/cleanup"} {
		if w := ask(NewHandler(new(fakeController)), "GET", path); w.Code != http.StatusMethodNotAllowed {
			t.Errorf("GET %s: %d", path, w.Code)
		}
	}
}

func TestControlEndsWithTheDaemon(t *testing.T) {
	began := make(chan struct{})
	f := &fakeController{do: func(ctx context.Context) error {
		close(began)
		<-ctx.Done()
		return ctx.Err()
	}}
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var both sync.WaitGroup
	both.Go(func() {
		if err := Serve(ctx, l, NewHandler(f)); err != nil {
			t.Error(err)
		}
	})
	both.Go(func() {
		if _, err := (Client{Socket: path}).Restore(context.Background(), api.RestoreRequest{}); err == nil {
			t.Error("a restore that was cut off is reported as done")
		}
	})
	<-began
	cancel()
	both.Wait()
}

func TestNoDaemon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if _, err := (Client{Socket: path}).Status(t.Context()); !errors.Is(err, ErrNoDaemon) {
		t.Errorf("no socket: got %v", err)
	}
	leaveStale(t, path)
	if _, err := (Client{Socket: path}).Status(t.Context()); !errors.Is(err, ErrNoDaemon) {
		t.Errorf("a socket of a dead daemon: got %v", err)
	}
}

// leaveStale leaves a socket behind like a killed daemon.
func leaveStale(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
}

func TestListenControl(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "run", "deep", "s")
	l, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): 0o700} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode(), err, want)
		}
	}
	if _, err := Listen(t.Context(), path); !errors.Is(err, api.ErrAlreadyRunning) {
		t.Errorf("a second one: got %v", err)
	}
	l.Close()

	leaveStale(t, path)
	l, err = Listen(t.Context(), path)
	if err != nil {
		t.Fatalf("a stale socket is in the way: %v", err)
	}
	l.Close()

	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), path); err == nil {
		t.Error("a file that is no socket was replaced")
	}
	if text, _ := os.ReadFile(path); string(text) != "precious" {
		t.Errorf("the file holds %q now", text)
	}
	if _, err := Listen(t.Context(), filepath.Join(dir, strings.Repeat("a", 200))); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("a path that is too long: got %v", err)
	}
}

func TestStrangersAreNotHeard(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	inner, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	var uids []uint32
	l := &peerListener{UnixListener: inner, log: klog.Background(), allowed: func(uid uint32) bool {
		uids = append(uids, uid)
		return len(uids) > 1 // the first user is a stranger
	}}
	defer l.Close()
	for range 2 {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "hello"); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	own := uint32(os.Geteuid())
	if diff := cmp.Diff([]uint32{own, own}, uids); diff != "" {
		t.Errorf("asked about (-want +got):\n%s", diff)
	}
	l = newPeerListener(t.Context(), inner).(*peerListener)
	for uid, want := range map[uint32]bool{0: true, own: true, own + 1: false, 65534: false} {
		if got := l.allowed(uid); got != want {
			t.Errorf("user %d: %v, want %v", uid, got, want)
		}
	}
}

func TestProved(t *testing.T) {
	tests := []struct {
		outcomes map[rules.Family]api.Outcome
		want     bool
	}{
		{nil, false},
		{map[rules.Family]api.Outcome{rules.IPv4: reload.Proved, rules.IPv6: reload.Proved}, true},
		{map[rules.Family]api.Outcome{rules.IPv4: reload.Proved, rules.IPv6: reload.Partial}, false},
		{map[rules.Family]api.Outcome{rules.IPv4: reload.Raced, rules.IPv6: reload.Skipped}, true},
		{map[rules.Family]api.Outcome{rules.IPv4: reload.Failed}, false},
	}
	for _, tt := range tests {
		if got := (api.RestoreReply{Outcomes: tt.outcomes}).Proved(); got != tt.want {
			t.Errorf("%v: %v", tt.outcomes, got)
		}
	}
}

func ask(h http.Handler, method, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
	return w
}
