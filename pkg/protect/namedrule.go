package protect

import (
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A namedRule is the form of a rule that an owner puts straight into a built-in
// chain, word by word as iptables-save prints it.
type namedRule struct {
	table rules.TableName
	chain string
	// words are compared as they are, but for "<something>": that stands for
	// one word, the same wherever it occurs in the rule, and "<bridge>" for
	// the name of a bridge that Docker made.
	words []string
}

func nameRule(t rules.TableName, chain, spec string) namedRule {
	return namedRule{t, chain, strings.Fields(spec)}
}

// matches reports whether a rule of such words has the form.
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
		case want == "<bridge>" && !dockerBridge(words[i]):
			return false
		case filled[want] != "" && filled[want] != words[i]:
			return false
		default:
			filled[want] = words[i]
		}
	}
	return true
}

// dockerBridge reports whether Docker gave the interface its name: docker0,
// Swarm's docker_gwbridge, or br- and the first 12 digits of the network's ID.
func dockerBridge(name string) bool {
	return name == "docker0" || name == "docker_gwbridge" || hashedName{"br-", 12, hexLow}.matches(name)
}
