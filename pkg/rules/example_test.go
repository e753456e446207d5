package rules_test

import (
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Two spellings of one rule are the same rule. With another port it is another rule.
func ExampleRule_Equal() {
	parse := func(spec string) rules.Rule {
		r, err := rules.ParseRule(spec)
		if err != nil {
			panic(err)
		}
		return r
	}
	written := parse("--protocol tcp --dport 8080 -s 10.1.2.3 -j ACCEPT")
	printed := parse("-s 10.1.2.3/32 -p tcp -m tcp --dport 8080 -j ACCEPT")
	another := parse("-s 10.1.2.3/32 -p tcp -m tcp --dport 8081 -j ACCEPT")
	fmt.Println(written.Equal(printed), written.Equal(another))
	fmt.Println(written.Meaning())
	// Output:
	// true false
	// -s 10.1.2.3/32 -p 6 -m tcp --dport 8080 -j ACCEPT
}

// The missing rules of a section, by their meaning. Rules of others are no part of a section.
func ExampleDiff() {
	section := func(text string) rules.Section {
		fragment, err := rules.ParseFragment(strings.NewReader(text), rules.IPv4, rules.Filter)
		if err != nil {
			panic(err)
		}
		return fragment.Sections[rules.Filter]
	}
	wanted := section(`*filter
:MY-FIREWALL - [0:0]
-A INPUT -j MY-FIREWALL
-A MY-FIREWALL -p tcp -m tcp --dport 22 -j ACCEPT
-A MY-FIREWALL -j DROP
COMMIT
`)
	found := section(`*filter
:MY-FIREWALL - [0:0]
-A MY-FIREWALL -p tcp --dport 22 -j ACCEPT
COMMIT
`)
	fmt.Println(rules.Diff(wanted, found))
	fmt.Println("the same:", len(rules.Diff(wanted, wanted)) == 0)
	// Output:
	// jump is missing: -A INPUT -j MY-FIREWALL (at the bottom)
	// rule 2 is missing: -A MY-FIREWALL -j DROP
	// the same: true
}

// A generation is the set of rules that ought to be in force, by table. Its ID is a digest.
func ExampleRender() {
	fragment, err := rules.ParseFragment(strings.NewReader(`*filter
:MY-FIREWALL - [0:0]
-A MY-FIREWALL -s 192.0.2.0/24 -j DROP
-I INPUT -j MY-FIREWALL
COMMIT
`), rules.IPv4, protect.Tables()...)
	if err != nil {
		panic(err)
	}
	generation := rules.Generation{}.With(rules.IPv4.Table(rules.Filter), fragment.Sections[rules.Filter])
	number, chains := generation.Counts()
	fmt.Println(generation.ID(), number, "rules", chains, "chain")
	fmt.Print(rules.Render(generation, rules.IPv4))
	// Output:
	// dd3889358110 2 rules 1 chain
	// *filter
	// :MY-FIREWALL - [0:0]
	// -A INPUT -j MY-FIREWALL
	// -A MY-FIREWALL -s 192.0.2.0/24 -j DROP
	// COMMIT
}
