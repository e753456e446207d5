package iptables

import (
	"bytes"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTablesThatComeLaterAreListed: the kernel's list is read again each time,
// although its file is opened once.
func TestTablesThatComeLaterAreListed(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "ip6tables-legacy")
		for _, family := range rules.Families() {
			s, err := openXT(family)
			if err != nil {
				t.Fatal(err)
			}
			var want []rules.TableName
			for _, next := range []rules.TableName{"", rules.Mangle, rules.Nat, rules.Filter} {
				if next != "" {
					iptablesCommand(t, Legacy, family, "-t "+string(next)+" -L -n")
					want = slices.Compact(slices.Sorted(slices.Values(append(want, next))))
				}
				got, err := s.tables()
				if diff := cmp.Diff(want, got); diff != "" || err != nil {
					t.Errorf("%s, after %q came: %v (-want +got):\n%s", family, next, err, diff)
				}
			}
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestEntriesFitTheirShape: another process moves a rule from one built-in chain
// to the other and back. That changes where chains begin, but not the size of the
// table. With the shape of one state and the entries of the other, a policy looks
// like a rule.
func TestEntriesFitTheirShape(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "iptables-legacy-restore")
		commits := testkit.Size(160, 1200)
		const rule = "-s 10.0.0.1/32 -j ACCEPT"
		fill := "*filter\n:FILL - [0:0]\n" + strings.Repeat("-A FILL -j RETURN\n", 4000) + "-A INPUT " + rule + "\nCOMMIT\n"
		writer := exec.CommandContext(t.Context(), "iptables-legacy-restore", "-w", "5", "--noflush")
		writer.Stdin = io.MultiReader(strings.NewReader(fill), strings.NewReader(strings.Repeat(
			"*filter\n-D INPUT 1\n-I FORWARD "+rule+"\nCOMMIT\n*filter\n-D FORWARD 1\n-I INPUT "+rule+"\nCOMMIT\n", commits/2)))
		var stderr bytes.Buffer
		writer.Stderr = &stderr
		s, err := openXT(rules.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		if err := writer.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- writer.Wait() }()
		reads, wrong := 0, 0
		for running := true; running; {
			select {
			case err := <-ended:
				if running = false; err != nil {
					t.Errorf("the writer: %v: %s", err, &stderr)
				}
			default:
			}
			tables, err := s.tables()
			if err != nil {
				t.Fatal(err)
			}
			if len(tables) == 0 {
				continue
			}
			moved := map[string]int{}
			err = s.entries(rules.Filter, func(info xtInfo, data []byte) error {
				if info.entries < 4000 {
					return nil
				}
				reads++
				chain := ""
				return walkEntries(rules.IPv4, info, data, xtVisitor{
					chain: func(name string, _ int) { chain = name },
					rule: func(r xtRule) {
						if chain != "FILL" {
							moved[fmt.Sprintf("%s %d", chain, r.entry.whole[:4])]++
						}
					},
				})
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(moved) > 1 || len(moved) == 1 && moved["INPUT [10 0 0 1]"]+moved["FORWARD [10 0 0 1]"] != 1 {
				if wrong++; wrong < 4 {
					t.Errorf("rules outside of FILL: %v, want one of 10.0.0.1 in INPUT or FORWARD", moved)
				}
			}
		}
		if t.Logf("%d reads beside %d commits, %d wrong", reads, commits, wrong); reads < commits/10 {
			t.Errorf("%d reads beside %d commits are too few to meet one", reads, commits)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}
