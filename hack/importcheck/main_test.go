package main

import (
	"slices"
	"strings"
	"testing"
)

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name, imported string
		want           string // part of the reason; empty for allowed
	}{
		{"cmd/canaryd", module + "internal/daemon", ""},
		{"cmd/canaryd", module + "pkg/rules", ""},
		{"internal/daemon", module + "pkg/reload", ""},
		{"pkg/canary", module + "pkg/iptables", ""},
		{"internal/daemon", module + "pkg/conntrack", ""},
		{"pkg/conntrack", module + "pkg/rules", ""},
		{"pkg/conntrack", module + "pkg/iptables", "imports run one way"},
		{"pkg/rules/kube", module + "pkg/rules", ""},
		{"pkg/reload", module + "pkg/rules/kube", ""},
		{"cmd/canaryd", module + "internal/source", ""},
		{"internal/source", module + "pkg/rules/kube", ""},
		{"internal/source", "github.com/fsnotify/fsnotify", ""},
		{"internal/source", module + "pkg/iptables", "imports run one way"},
		{"internal/source", module + "internal/daemon", "imports run one way"},
		{"internal/daemon", module + "internal/source", "loaded by cmd"},
		{"pkg/canary", module + "pkg/reload", "imports run one way"},
		{"pkg/iptables", module + "pkg/nft", ""},
		{"pkg/nft", module + "pkg/iptables", "imports run one way"},
		{"pkg/nft", module + "pkg/rules", "knows nothing of iptables"},
		{"pkg/native", module + "pkg/nft", ""},
		{"pkg/native", module + "pkg/rules", "knows tables as raw objects"},
		{"pkg/watch", module + "pkg/nft", ""},
		{"pkg/watch", module + "pkg/rules", "knows no rules"},
		{"pkg/tableid", module + "pkg/rules", "standard library only"},
		{"internal/daemon", module + "internal/metrics", ""},
		{"cmd/canaryd", module + "internal/sdnotify", ""},
		{"internal/web", module + "internal/api", ""},
		{"internal/api", module + "internal/control", "imports run one way"},
		{"internal/web", module + "internal/serve", ""},
		{"internal/web", module + "internal/daemon", "faces know the daemon by the values"},
		{"internal/api", module + "pkg/reload", ""},
		{"internal/control", module + "internal/daemon", "imports run one way"},
		{"internal/source", module + "internal/api", "a face is imported by"},
		{"internal/here", module + "internal/api", ""},
		{"internal/here", module + "internal/serve", ""},
		{"internal/pods", module + "internal/culprit", ""},
		{"internal/pods", module + "internal/serve", "a face is imported by"},
		{"internal/culprit", module + "internal/pods", "imports run one way"},
		{"internal/here", module + "internal/metrics", "a face is imported by"},
		{"internal/here", module + "internal/daemon", "imports run one way"},
		{"pkg/reload", module + "internal/metrics", "a face is imported by"},
		{"pkg/reload", module + "pkg/iptables/iptablestest", "test helpers"},
		{"pkg/nft", module + "pkg/nft/nfttest", "test helpers"},
		{"pkg/iptables/iptablestest", module + "pkg/iptables", ""},
		{"pkg/rules", module + "pkg/iptables", "imports run one way"},
		{"pkg/rules", module + "pkg/rules/kube", "imports run one way"},
		{"internal/daemon", module + "cmd/canaryd", "imports run one way"},
		{"pkg/canary", module + "internal/testkit/nstest", "test helpers"},
		{"hack/demo", module + "internal/testkit/netns", ""},
		{"internal/testkit/scenario", module + "pkg/iptables", ""},
		{"pkg/rules", "strings", ""},
		{"pkg/rules", "net/netip", ""},
		{"pkg/rules", "os", "no I/O"},
		{"pkg/rules", "os/exec", "no I/O"},
		{"pkg/rules", "net", "no I/O"},
		{"pkg/rules", "time", "reads no clock"},
		{"pkg/rules", "golang.org/x/sys/unix", "standard library, pkg/nat and pkg/tableid only"},
		{"pkg/rules", module + "pkg/nat", ""},
		{"pkg/nat", module + "pkg/tableid", "standard library only"},
		{"pkg/native", module + "pkg/nat", ""},
		{"pkg/rules/kube", "k8s.io/api/core/v1", "nothing else from outside"},
		{"pkg/rules/kube", "sigs.k8s.io/yaml", ""},
		{"pkg/rules/kube", "k8s.io/client-go/kubernetes", "nothing else from outside"},
		{"internal/daemon", "github.com/prometheus/client_golang/prometheus", "see Prometheus"},
		{"internal/web", "github.com/prometheus/client_golang/prometheus/promhttp", ""},
		{"internal/metrics", "github.com/prometheus/client_golang/prometheus", ""},
		{"pkg/reload", "github.com/prometheus/client_golang/prometheus", "see Prometheus"},
		{"pkg/iptables", "os/exec", ""},
		{"pkg/reload", "os/exec", "executes programs"},
		{"internal/daemon", "os/exec", "executes programs"},
		{"cmd/canaryd", "os/exec", "executes programs"},
		{"hack/importcheck", "os/exec", ""},
		{"internal/testkit/nstest", "os/exec", ""},
		{"internal/testkit/nstest", module + "internal/testkit/browser", "browser's driver"},
		{"hack/screenshot", module + "internal/testkit/browser", ""},
	} {
		got := strings.Join(judge(c.name, c.imported), "; ")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s imports %s: reasons %q, want %q", c.name, c.imported, got, c.want)
		}
	}
}

func TestCheck(t *testing.T) {
	packages, err := read(strings.NewReader(`
		{"ImportPath": "github.com/canaryd/canaryd/pkg/rules", "Imports": ["os", "fmt"]}
		{"ImportPath": "github.com/canaryd/canaryd/pkg/canary", "Imports": ["fmt"]}
		{"ImportPath": "github.com/canaryd/canaryd/pkg/attic", "Imports": ["fmt"]}
		{"ImportPath": "github.com/canaryd/canaryd/test/attic", "Imports": ["fmt"]}`))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"pkg/rules imports os: pkg/rules does no I/O and reads no clock",
		"pkg/attic is no room of the house: give it a place in hack/importcheck",
	}
	if got := check(packages); !slices.Equal(got, want) {
		t.Errorf("check says %q, want %q", got, want)
	}
	if _, err := read(strings.NewReader("{")); err == nil {
		t.Error("half an object was read without an error")
	}
}
