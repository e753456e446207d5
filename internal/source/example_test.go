package source_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/canaryd/canaryd/internal/source"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A fragment declares chains of the operator's own. A broken file declares nothing.
func ExampleLoad() {
	dir, err := os.MkdirTemp("", "rules")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "10-site.v4")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			panic(err)
		}
	}
	files := source.RulesDir{Dir: dir, Families: []rules.Family{rules.IPv4}}

	write("*filter\n:SITE - [0:0]\n-A SITE -s 192.0.2.0/24 -j DROP\nCOMMIT\n")
	declared, err := source.Load(context.Background(), files)
	count, chains := declared.Generation.Counts()
	fmt.Println(count, "rule in", chains, "chain; SITE is declared:", declared.Claims("SITE"), err)

	write("*filter\n:SITE - [0:0]\n")
	_, err = source.Load(context.Background(), files)
	fmt.Println(err != nil)
	// Output:
	// 1 rule in 1 chain; SITE is declared: true <nil>
	// true
}
