package owners

import (
	"path"
	"strings"
)

// Matches reports whether a rule with these words, in that chain and table, has the form. A
// preset then protects the rule, and status names its owner.
func (s Straight) Matches(inTable, chain string, words []string) bool {
	switch {
	case s.Table != inTable || s.Chain != chain:
		return false
	case s.Comment != "":
		return s.hasComment(words)
	case len(s.Words) != len(words):
		return false
	}
	filled := map[string]string{}
	for i, want := range s.Words {
		switch {
		case want == words[i]:
		case want[0] != '<':
			return false
		case want == "<bridge>" && !isDockerBridge(words[i]), want == "<cali>" && !strings.HasPrefix(words[i], "cali:"),
			want == "<vni>" && !strings.Contains(words[i], vniAt), want == "<loopback>" && !strings.HasPrefix(words[i], "127."), want == "<wg>" && !strings.HasPrefix(words[i], "wg"):
			return false
		case filled[want] != "" && filled[want] != words[i]:
			return false
		default:
			filled[want] = words[i]
		}
	}
	return true
}

// unsigned marks the forms as Unsigned and returns them.
func unsigned(list []Straight) []Straight {
	for i := range list {
		list[i].Unsigned = true
	}
	return list
}

// vniAt is the place of a VXLAN header's network in Docker's u32 matches: 12 bytes into the
// datagram, as iptables-save prints it.
const vniAt = "0xc&0xffffff00="

// hasComment reports whether the rule has a comment that s.Comment, a glob, matches. Matches
// calls it.
func (s Straight) hasComment(words []string) bool {
	for i := range len(words) - 1 {
		if words[i] == "--comment" {
			if is, err := path.Match(s.Comment, words[i+1]); is && err == nil {
				return true
			}
		}
	}
	return false
}

// networkBridge is the form of the names that Docker gives to bridges, with the first 12 digits
// of the network's ID.
var networkBridge = forms("br-<hex:12>")[0]

// isDockerBridge reports whether Docker chose the interface's name: docker0, Swarm's
// docker_gwbridge, or br- and the first 12 digits of the network's ID.
func isDockerBridge(name string) bool {
	return name == "docker0" || name == "docker_gwbridge" || networkBridge.Matches(name)
}

// straight returns the forms of rules of a built-in chain, for the table of owners. Each
// spec is a rule's text with placeholders (see Straight.Words). Words in quotes are one
// word.
func straight(inTable, chain string, specs ...string) []Straight {
	var list []Straight
	for _, spec := range specs {
		rule := Straight{Table: inTable, Chain: chain}
		for i, part := range strings.Split(spec, `"`) {
			if i%2 == 1 {
				rule.Words = append(rule.Words, part)
				continue
			}
			rule.Words = append(rule.Words, strings.Fields(part)...)
		}
		list = append(list, rule)
	}
	return list
}

// byComment returns the forms of rules whose comment, a glob, identifies the owner, for the
// table of owners. places are such as "filter INPUT".
func byComment(glob string, places ...string) []Straight {
	var list []Straight
	for _, place := range places {
		inTable, chain, _ := strings.Cut(place, " ")
		list = append(list, Straight{Table: inTable, Chain: chain, Comment: glob})
	}
	return list
}
