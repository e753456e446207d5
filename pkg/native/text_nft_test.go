package native_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
)

// otherWords has the rules without a placeholder whose words differ from nft's. Both forms are in
// its language: nft finds the name of a device on this machine, and knows fields of some bits.
var otherWords = map[string]string{
	`oif "lo" accept`:              "oif 1 accept",
	"ip dscp set cs1 ip ttl set 9": "meta nfproto ipv4 @nh,0,16 set @nh,0,16 & 0xff23 | 0x20 @nh,64,16 set @nh,64,16 & 0x9ff | 0x900",
}

// TestRulesReadAsNftPrintsThem: each rule must read as nft lists it. Only an expression without
// words may be a placeholder.
func TestRulesReadAsNftPrintsThem(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		loadCorpus(t)
		nstest.CommandInput(t, services(t, services100), "nft", "-f", "-")
		same, placeholders, all := 0, 0, 0
		list := listedTables(t, "-s")
		for id, table := range capture(t, dial(t)).Tables {
			want := listedRules(list["table "+id.Family.NFT()+" "+id.Name+" {"])
			var got []string
			for l := range table.Lines() {
				if l.Kind == nft.Rules {
					_, text, _ := strings.Cut(strings.TrimPrefix(l.Text, "rule "), " ")
					got = append(got, text)
				}
			}
			if len(got) != len(want) {
				t.Errorf("%s: %d rules, nft lists %d\n%s\n\n%s", id, len(got), len(want), strings.Join(got, "\n"), strings.Join(want, "\n"))
				continue
			}
			for i := range got {
				switch all++; {
				case got[i] == want[i]:
					same++
				case placeholder.MatchString(got[i]):
					placeholders++
				case got[i] != otherWords[want[i]]:
					t.Errorf("%s (-nft +here):\n-%s\n+%s", id, want[i], got[i])
				}
			}
		}
		t.Logf("%d rules: %d as nft prints them, %d with a placeholder", all, same, placeholders)
		if all < 300 || placeholders > 11 {
			t.Errorf("%d of %d rules have a placeholder, want 11 of some 330 at most", placeholders, all)
		}
	})
}

// A placeholder is the name of an expression and its bytes, between brackets.
var placeholder = regexp.MustCompile(`\[[a-z]+ 0x[0-9a-f.]+\]`)

var blanks = regexp.MustCompile(`\s+`)

// listedRules returns the rules of a list of nft, table by table and chain by chain. Each rule is
// on one line, with the rules of chains that belong to it.
func listedRules(list string) (rules []string) {
	inChain, rule, depth := false, "", 0
	for line := range strings.Lines(list) {
		text := strings.TrimSpace(line)
		switch {
		case !inChain:
			inChain = strings.HasPrefix(line, "\tchain ")
		case depth == 0 && line == "\t}\n":
			inChain = false
		case depth == 0 && (text == "" || strings.HasPrefix(text, "type ") && strings.Contains(text, " hook ") || strings.HasPrefix(text, "comment ")):
		default:
			if rule != "" && depth > 0 && !slices.ContainsFunc([]string{"{", ","}, func(end string) bool { return strings.HasSuffix(rule, end) }) && text != "}" {
				rule += ";"
			}
			rule += " " + text
			depth += strings.Count(text, "{") - strings.Count(text, "}")
			if depth == 0 {
				rules, rule = append(rules, strings.TrimSpace(blanks.ReplaceAllString(rule, " "))), ""
			}
		}
	}
	return rules
}
