package reload

import (
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	v4 = rules.IPv4
	v6 = rules.IPv6
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func rule(spec string) rules.Rule {
	r, err := rules.ParseRule(spec)
	if err != nil {
		panic(err)
	}
	return r
}

// ruleList parses rules.
func ruleList(specs ...string) []rules.Rule {
	var list []rules.Rule
	for _, s := range specs {
		list = append(list, rule(s))
	}
	return list
}

func protects(chain string) bool {
	return strings.HasPrefix(chain, "KUBE-") && !strings.HasSuffix(chain, "-CANARY")
}

// tableOf parses the lines of one table: ":CHAIN" declares a user's chain, "-A" adds a rule. It
// adds the built-in chains.
func tableOf(t *testing.T, table rules.TableName, lines ...string) *rules.Table {
	t.Helper()
	var b strings.Builder
	b.WriteString("*" + string(table) + "\n")
	for _, c := range rules.BuiltinChains(table) {
		b.WriteString(":" + c + " ACCEPT [0:0]\n")
	}
	for _, line := range lines {
		if line[0] == ':' {
			line += " - [0:0]"
		}
		b.WriteString(line + "\n")
	}
	b.WriteString("COMMIT\n")
	set := savefile.Tables(t, b.String())
	return set[table]
}

func sectionOf(t *testing.T, table rules.TableName, lines ...string) rules.Section {
	t.Helper()
	return rules.Protection{Chain: protects}.Extract(tableOf(t, table, lines...), canary.IsMark)
}
