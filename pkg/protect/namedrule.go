package protect

import "github.com/canaryd/canaryd/pkg/rules"

// A namedRule is the form of a rule that an owner writes into a built-in chain itself, word by
// word as iptables-save prints it.
type namedRule struct {
	table rules.TableName
	chain string
	// words are compared literally, except placeholders such as "<net>". A placeholder stands
	// for one word, the same wherever it occurs in the rule. "<bridge>" takes only the name of
	// a bridge that Docker made.
	words []string
}

// matches reports whether a rule with these words has the form.
func (n namedRule) matches(t rules.TableName, chain string, words []string) bool {
	if n.table != t || n.chain != chain || len(n.words) != len(words) {
		return false
	}
	filled := map[string]string{}
	for i, want := range n.words {
		switch {
		case want == words[i]:
		case want[0] != '<':
			return false
		case want == "<bridge>" && !isDockerBridge(words[i]):
			return false
		case filled[want] != "" && filled[want] != words[i]:
			return false
		default:
			filled[want] = words[i]
		}
	}
	return true
}

// isDockerBridge reports whether Docker chose the interface's name: docker0, Swarm's
// docker_gwbridge, or br- and the first 12 digits of the network's ID.
func isDockerBridge(name string) bool {
	return name == "docker0" || name == "docker_gwbridge" || hashedName{"br-", 12, hexLow}.matches(name)
}
