package kube

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSpelling loads the corpus into both backends. iptables-save must print this package's
// rules unchanged, and kube-proxy's rules in the same words.
func TestSpelling(t *testing.T) {
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-"+backend, "ip6tables-"+backend)
				for name, c := range corpus(t, "kube-proxy-1.36.3") {
					program := map[rules.Family]string{rules.IPv4: "iptables-", rules.IPv6: "ip6tables-"}[c.family] + backend
					load := func(text string) rules.Ruleset {
						nstest.CommandInput(t, text, program+"-restore", "-w")
						set := savefile.Tables(t, nstest.Command(t, program+"-save"))
						return set
					}
					objects, err := Decode(name, c.objects)
					if err != nil {
						t.Fatal(err)
					}
					g, _, err := Generate(objects, c.options)
					if err != nil {
						t.Fatal(err)
					}
					ours, theirs := load(rules.Render(g, c.family)), load(string(c.text))
					for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
						want := words(tableOf(t, g[c.family.Table(table)], table))
						for what, saved := range map[string]rules.Ruleset{"ours (- written, + saved)": ours, "(- ours, + kube-proxy's, both saved)": theirs} {
							if got := words(saved[table]); !reflect.DeepEqual(want, got) { // cmp takes long for large values
								t.Errorf("%s %s: %s:\n%s", name, table, what, cmp.Diff(want, got))
							}
						}
					}
				}
			})
		})
	}
}

// words returns the text of every chain's rules.
func words(table *rules.Table) map[string][]string {
	all := map[string][]string{}
	for _, c := range table.Chains {
		specs := []string{}
		for _, r := range inOrder(c) {
			specs = append(specs, r.Spec)
		}
		all[c.Name] = specs
	}
	return all
}

// inOrder returns a chain's rules. Where kube-proxy's order is random, the rules of a service's
// port keep their order and the ports are sorted. The same holds for the rules for addresses
// with node ports, which end KUBE-SERVICES.
func inOrder(c rules.Chain) []rules.Rule {
	all := slices.Clone(c.Rules)
	switch c.Name {
	case servicesChain, nodePortsChain, externalServicesChain, proxyFirewall:
		end := len(all)
		for end > 0 && strings.Contains(all[end-1].Spec, "this must be the last rule") {
			end--
		}
		sortBy(all[:end], subject)
		sortBy(all[end:], func(words []string) string { return strings.TrimSuffix(option(words, "-d"), "/32") })
	}
	return all
}

func sortBy(all []rules.Rule, key func(words []string) string) {
	slices.SortStableFunc(all, func(a, b rules.Rule) int {
		x, _ := rules.Split(a.Spec)
		y, _ := rules.Split(b.Spec)
		return strings.Compare(key(x), key(y))
	})
}

// subject returns the first word of a rule's comment and its protocol. They identify the rule's
// service port.
func subject(words []string) string {
	return strings.Fields(option(words, "--comment") + " -")[0] + " " + option(words, "-p")
}

func option(words []string, name string) string {
	if i := slices.Index(words, name); i >= 0 && i+1 < len(words) {
		return words[i+1]
	}
	return ""
}
