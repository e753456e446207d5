package source

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/canaryd/canaryd/internal/testkit/testlog"
	"github.com/canaryd/canaryd/pkg/rules"
)

// startOf starts a Watcher like a daemon does, and returns its problems.
func startOf(t *testing.T, cache string, sources ...Source) (*Watcher, Declared, []Problem, *testlog.Log) {
	t.Helper()
	log := &testlog.Log{}
	w := NewWatcher(nil, sources...)
	w.Cache = Cache{cache}
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log))))
	declared := w.Start(ctx)
	ended, end := context.WithCancel(ctx)
	end()
	must(t, w.Run(ended)) // only until the good declaration is kept
	select {
	case problems := <-w.Problems():
		return w, declared, problems, log
	default:
		return w, declared, nil, log
	}
}

// TestStartWithBrokenFiles: at a start, the declaration that an earlier run kept replaces files
// that cannot be used. Without such a declaration the source claims nothing. Other sources are
// used normally.
func TestStartWithBrokenFiles(t *testing.T) {
	dir, cache := t.TempDir(), t.TempDir()
	m, r := manifest(filepath.Join(dir, "m")), RulesDir{Dir: filepath.Join(dir, "r")}
	write(t, dir, map[string]string{"m/a.yaml": service("a", 1), "r/site.v4": "*filter\n:SITE\n-A SITE -j NOSUCH x\nbad\n"})

	_, declared, problems, log := startOf(t, cache, m, r)
	if got := services(declared); !slices.Equal(got, []string{"a"}) || declared.Claims("SITE") || !declared.Known() {
		t.Errorf("services %q, SITE claimed: %t", got, declared.Claims("SITE"))
	}
	if len(problems) != 1 || problems[0].Instead != Nothing || problems[0].Source != "rules-dir" || problems[0].Where != filepath.Join(dir, "r/site.v4")+":4" || problems[0].Since.IsZero() {
		t.Errorf("problems: %+v", problems)
	}
	if !strings.Contains(log.String(), "canaryd has no earlier good rules") {
		t.Errorf("the log:\n%s", log)
	}

	write(t, dir, map[string]string{"r/site.v4": site})
	if _, declared, problems, _ = startOf(t, cache, m, r); len(problems) > 0 || !declared.Claims("SITE") {
		t.Errorf("problems: %+v", problems)
	}
	write(t, dir, map[string]string{"r/site.v4": "*filter\n", "m/a.yaml": "kind: ["})
	_, stored, problems, log := startOf(t, cache, m, r)
	if got, want := stored.Generation.ID(), declared.Generation.ID(); got != want || !stored.Claims("SITE") || !stored.Claims("KUBE-SERVICES") {
		t.Errorf("from disk comes %s, want %s", got, want)
	}
	if len(problems) != 2 || problems[0].Instead != Stored || problems[1].Instead != Stored {
		t.Errorf("problems: %+v", problems)
	}
	if !strings.Contains(log.String(), "the rules that an earlier run read from the same files stay in force") {
		t.Errorf("the log:\n%s", log)
	}
	if _, where := stored.Origin(rules.IPv4, rules.Filter, "SITE", rules.Rule{Spec: "-j DROP", Target: "DROP"}); !strings.Contains(where, "the stored fragments of") {
		t.Errorf("a rule from disk is said to stand in %q", where)
	}

	// The files of another folder, and a damaged file, must not be used.
	other := RulesDir{Dir: filepath.Join(dir, "other")}
	if _, declared, _, _ = startOf(t, cache, other); declared.Known() {
		t.Error("what another folder said is in force")
	}
	must(t, os.WriteFile(filepath.Join(cache, "declared-rules-dir.json"), []byte(`{"format":1,`), 0o600))
	_, declared, problems, log = startOf(t, cache, r)
	if declared.Known() || len(problems) != 1 || problems[0].Instead != Nothing || !strings.Contains(log.String(), "is corrupt") {
		t.Errorf("problems %+v, the log:\n%s", problems, log)
	}
}

// TestStartIsMended: files that were broken at the start are used once they are repaired. An
// empty declaration is not mistaken for an unknown one.
func TestStartIsMended(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": "kind: ["})
	w := NewWatcher(nil, manifest(dir))
	declared := w.Start(t.Context())
	if problems := <-w.Problems(); declared.Known() || len(problems) != 1 {
		t.Fatalf("known %t, problems %+v", declared.Known(), problems)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	write(t, dir, map[string]string{"a.yaml": "apiVersion: v1\nkind: List\nitems: []\n"})
	if next := <-w.Changes(); !next.Known() || !next.Claims("KUBE-SERVICES") {
		t.Error("the mended manifest claims nothing")
	}
	if problems := <-w.Problems(); len(problems) > 0 {
		t.Errorf("still %+v", problems)
	}
	cancel()
	must(t, <-ended)
}
