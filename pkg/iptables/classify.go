package iptables

import (
	"bytes"
	"strings"
)

// maxErrorText bounds RestoreError.Stderr.
const maxErrorText = 1 << 10

// reasonTexts classify a refusal; classify tries them in this order. The exit codes are
// ambiguous. 4 is the lock on legacy and any refusal of the kernel on nft. 2 is a bad line, a
// missing chain or a missing set on both. All texts are from iptables 1.8.9 with LC_ALL=C.
var reasonTexts = []struct {
	text   string
	reason Reason
}{
	{"holding the xtables lock", ReasonLock},
	{"is incompatible, use 'nft' tool", ReasonIncompatible},
	// "Set nosuch doesn't exist." is libxt_set's text, for both backends.
	{"doesn't exist.", ReasonMissingSet},
	// nft: "Chain 'X' does not exist".
	{"does not exist", ReasonMissingChain},
	// Legacy mistakes a jump to a missing chain for an extension.
	{"Couldn't load target `", ReasonMissingChain},
	// nft, for -A, -I or -F of a missing chain.
	{"No chain/target/match by that name", ReasonMissingChain},
	{"Couldn't load match `", ReasonParse},
	{"unknown option", ReasonParse},
	{"Bad argument", ReasonParse},
	{"COMMIT expected", ReasonParse},
	{"invalid port/service", ReasonParse},
	{"not found", ReasonParse}, // host/network `1.2.3.400' not found
	{"table name", ReasonParse},
	{"invalid", ReasonParse},
}

// classify reads the complaints of a failed restore, for Refusal.
func classify(stderr string) Reason {
	if isPermissionText(stderr) {
		return ReasonOther
	}
	for _, t := range reasonTexts {
		if strings.Contains(stderr, t.text) {
			return t.reason
		}
	}
	// All complaints of the option parser end like this.
	if strings.Contains(stderr, "--help' for more information") && !strings.Contains(stderr, "unable to initialize") {
		return ReasonParse
	}
	return ReasonOther
}

// firstLines returns the beginning of a text on one line, for errors and logs: at most
// maxErrorText bytes, without the advice to read the manual.
func firstLines(stderr []byte) string {
	var lines []string
	for line := range bytes.Lines(stderr) {
		text := strings.TrimSpace(string(line))
		if text != "" && !strings.HasPrefix(text, "Try `") && !strings.HasPrefix(text, "# Warning") {
			lines = append(lines, text)
		}
	}
	text := strings.Join(lines, "; ")
	if len(text) > maxErrorText {
		text = text[:maxErrorText] + "..."
	}
	return text
}
