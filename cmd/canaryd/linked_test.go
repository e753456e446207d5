package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestNothingReachesKubernetes: canaryd has its own types to read manifests, and no package
// that could talk to an API server. k8s.io/api would make its program a third larger.
func TestNothingReachesKubernetes(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	linked := strings.Fields(string(out))
	if len(linked) < 100 {
		t.Fatalf("only %d packages are linked: %q", len(linked), linked)
	}
	for _, name := range linked {
		for _, client := range []string{"k8s.io/client-go", "k8s.io/api", "k8s.io/apimachinery", "sigs.k8s.io/controller-runtime", "k8s.io/kubectl", "google.golang.org/grpc"} {
			if name == client || strings.HasPrefix(name, client+"/") {
				t.Errorf("%s is linked", name)
			}
		}
	}
}
