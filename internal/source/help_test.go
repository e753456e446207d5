package source

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/testlog"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// service returns a Service without endpoints: one REJECT rule in filter.
func service(name string, number int) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata:
  name: %s
  namespace: shop
spec:
  clusterIP: 10.96.0.%d
  clusterIPs: [10.96.0.%[2]d]
  ipFamilies: [IPv4]
  ports:
  - port: 80
    protocol: TCP
    targetPort: 8080
  type: ClusterIP
`, name, number)
}

func manifest(path string) Manifest {
	options := kube.DefaultOptions()
	options.Families = []rules.Family{rules.IPv4}
	return Manifest{Path: path, Options: options}
}

// services returns the names of the services that have rules in d.
func services(d Declared) []string {
	var names []string
	chain, _ := d.Generation[rules.IPv4.Table(rules.Filter)].Chain("KUBE-SERVICES")
	for _, r := range chain.Rules {
		_, rest, _ := strings.Cut(r.Spec, "shop/")
		name, _, _ := strings.Cut(rest, " ")
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// own returns "family table CHAIN" of every chain that is not kube's.
func own(d Declared) []string {
	var names []string
	for id, s := range d.Generation {
		f, t := id.Family, id.Name
		for _, c := range s.Chains {
			if !owners.KubeRules(c.Name) {
				names = append(names, fmt.Sprintf("%s %s %s", f, t, c.Name))
			}
		}
	}
	slices.Sort(names)
	return names
}

// write writes files like a program that renames the new file over the old one.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path+".new", []byte(text), 0o644))
		must(t, os.Rename(path+".new", path))
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A story is a running Watcher.
type story struct {
	*testing.T
	dir string
	*Watcher
	log    *testlog.Log
	counts chan string
}

// watch starts a Watcher that relies on events alone, unless again is short.
func watch(t *testing.T, dir string, again time.Duration, sources ...Source) *story {
	t.Helper()
	s := &story{T: t, dir: dir, log: &testlog.Log{}, counts: make(chan string, 1000)}
	s.Watcher = NewWatcher(func(source string) { s.counts <- source }, sources...)
	s.timing = timing{quiet: 30 * time.Millisecond, most: 300 * time.Millisecond, again: again}
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(s.log))))
	_, err := s.Load(ctx)
	must(t, err)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Watcher.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	// Run checks the files once when it begins. Wait for the end of that.
	testkit.Pass(t, 2*s.quiet, "that files are read once")
	return s
}

func (s *story) next() Declared {
	s.Helper()
	return testkit.Receive(s, s.Changes(), "declared rules")
}

// full returns a look that is satisfied once a channel has a value.
func full[T any](from <-chan T) func() error {
	return func() error {
		if len(from) == 0 {
			return errors.New("nothing is there")
		}
		return nil
	}
}

// becomes expects these services, at once or after intermediate changes.
func (s *story) becomes(want ...string) {
	s.Helper()
	if got := services(s.next()); !slices.Equal(got, want) {
		s.Fatalf("services %q, want %q", got, want)
	}
}

// stays expects that nothing is sent.
func (s *story) stays() {
	s.Helper()
	testkit.Pass(s, 8*s.quiet, "that nothing is sent")
	select {
	case d := <-s.Changes():
		s.Fatalf("sent services %q and chains %q, want nothing", services(d), own(d))
	default:
	}
}

// breaks expects one failure that is logged with these texts, and no change.
func (s *story) breaks(source string, texts ...string) {
	s.Helper()
	if got := testkit.Receive(s, s.counts, "a failure of source "+source); got != source {
		s.Errorf("source %s failed, want %s", got, source)
	}
	s.stays()
	log := s.log.String()
	for _, text := range texts {
		if !strings.Contains(log, text) {
			s.Errorf("the log does not say %q:\n%s", text, log)
		}
	}
}
