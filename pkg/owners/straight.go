package owners

import "strings"

// Matches reports whether a rule with these words has the form.
func (s Straight) Matches(inTable, chain string, words []string) bool {
	if s.Table != inTable || s.Chain != chain || len(s.Words) != len(words) {
		return false
	}
	filled := map[string]string{}
	for i, want := range s.Words {
		switch {
		case want == words[i]:
		case want[0] != '<':
			return false
		case want == "<bridge>" && !isDockerBridge(words[i]), want == "<cali>" && !strings.HasPrefix(words[i], "cali:"), want == "<loopback>" && !strings.HasPrefix(words[i], "127."):
			return false
		case filled[want] != "" && filled[want] != words[i]:
			return false
		default:
			filled[want] = words[i]
		}
	}
	return true
}

// networkBridge is the form of the names that Docker gives to bridges: the first 12 digits of the
// network's ID.
var networkBridge = forms("br-<hex:12>")[0]

// isDockerBridge reports whether Docker chose the interface's name: docker0, Swarm's
// docker_gwbridge, or br- and the first 12 digits of the network's ID.
func isDockerBridge(name string) bool {
	return name == "docker0" || name == "docker_gwbridge" || networkBridge.Matches(name)
}
