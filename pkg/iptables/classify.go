package iptables

import (
	"bytes"
	"regexp"
	"strconv"
	"strings"
)

// maxErrorText bounds RestoreError.Stderr.
const maxErrorText = 1 << 10

// linePattern finds the payload's line in a complaint of iptables-restore. 1.8.9 prints "line 2
// failed", "line 2: RULE_APPEND failed", "Error occurred at line: 2" or "COMMIT expected at line
// 3".
var linePattern = regexp.MustCompile(`(?m)\bline:? (\d+)`)

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

// classify reads the complaints of a failed restore, for Refusal. Line is the payload's line
// that they name, 0 if none. The line is near the bad one, but not always the bad one. If the
// kernel refuses, legacy names only the COMMIT line. nft names the line behind a jump to a
// missing chain.
func classify(stderr string) (reason Reason, line int) {
	if m := linePattern.FindStringSubmatch(stderr); m != nil {
		line, _ = strconv.Atoi(m[1]) // digits; a number that overflows is as good as none
	}
	if isPermissionText(stderr) {
		return ReasonOther, line
	}
	for _, t := range reasonTexts {
		if strings.Contains(stderr, t.text) {
			return t.reason, line
		}
	}
	// All complaints of the option parser end like this.
	if strings.Contains(stderr, "--help' for more information") && !strings.Contains(stderr, "unable to initialize") {
		return ReasonParse, line
	}
	return ReasonOther, line
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
