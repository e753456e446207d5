package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestNothingReachesKubernetes: canaryd holds types of Kubernetes' API, to read
// manifests, and nothing that could ask or tell an API server.
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
		for _, client := range []string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime", "k8s.io/kubectl", "google.golang.org/grpc"} {
			if name == client || strings.HasPrefix(name, client+"/") {
				t.Errorf("%s is linked", name)
			}
		}
	}
}
