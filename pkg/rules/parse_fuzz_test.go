package rules_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// saved writes a ruleset as iptables-save does.
func saved(set rules.Ruleset) string {
	var b strings.Builder
	for _, table := range set {
		fmt.Fprintf(&b, "*%s\n", table.Name)
		for _, c := range table.Chains {
			policy := c.Policy
			if policy == "" {
				policy = "-"
			}
			fmt.Fprintf(&b, ":%s %s [0:0]\n", c.Name, policy)
		}
		for _, c := range table.Chains {
			for _, r := range c.Rules {
				fmt.Fprintf(&b, "[1:2] -A %s %s\n", c.Name, r.Spec)
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

func FuzzParse(f *testing.F) {
	for _, pattern := range []string{
		"testdata/*.save",
		"../../internal/testkit/scenario/testdata/kube-proxy/*/expected.rules",
		"../../internal/testkit/scenario/testdata/node/*.rules",
	} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			f.Fatalf("no seeds at %s: %v", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(string(text))
		}
	}
	f.Add("# Table `nat' is incompatible, use 'nft' tool.\n")
	f.Add("*nat\n:A - [0:0]\n[1:2] -A A\nCOMMIT\n")
	f.Add("*nat\r\r\n:A - [0:0]\r\r\n-A A -j RETURN\r\r\nCOMMIT\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		set, _, err := rules.Parse(strings.NewReader(text))
		if err != nil {
			if set != nil {
				t.Fatalf("a ruleset and the error %v", err)
			}
			return
		}
		again, unreadable, err := rules.Parse(strings.NewReader(saved(set)))
		if err != nil || len(unreadable) > 0 {
			t.Fatalf("what was read cannot be read again: %v %v\n%s", err, unreadable, saved(set))
		}
		if d := cmp.Diff(set, again, exactly); d != "" {
			t.Errorf("what was read reads differently (-first +second):\n%s", d)
		}
	})
}
