package iptables

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// canaryd must know every extension that iptables has here. It takes an unknown
// extension for another project's, whose bytes may contain any text.
func TestEachExtensionIsKnown(t *testing.T) {
	var files []string
	for _, pattern := range []string{"/usr/lib/*/xtables/lib*.so", "/usr/lib*/xtables/lib*.so"} {
		some, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, some...)
	}
	if len(files) == 0 {
		nstest.NeedFile(t, "/usr/lib/xtables")
	}
	for _, file := range files {
		library, name, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".so"), "_")
		_, known := extensions[name]
		switch {
		case library == "libebt" || library == "libarpt": // ebtables' and arptables'
		case name == "standard" || name == "NAT": // for verdicts; for SNAT and others
		case !known:
			t.Errorf("%s has an extension that is not known: say in extensions.go which texts it prints", file)
		}
	}
	for name := range printedTexts {
		if _, known := extensions[name]; !known {
			t.Errorf("%s prints texts, and is not in the list of extensions", name)
		}
	}
}
