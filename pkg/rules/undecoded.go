package rules

import (
	"regexp"
	"slices"
	"strings"
)

// This file reads the labels of rules that canaryd knows by their bytes and decodes in part
// (ruleset.Label): an extension that is not decoded stands as "-m NAME [DIGEST]" or "-j NAME
// [DIGEST]", with the names of its ipsets behind the digest, and an expression of nf_tables as
// "[NAME DIGEST]". Nothing in quotes counts: a comment may look like such a name, or like the
// beginning of a name that ends behind the next.
var (
	quoted              = regexp.MustCompile(`"(\\.|[^"\\])*"`)
	undecodedExtension  = regexp.MustCompile(`( -[mj] (\S+)) \[[0-9a-f]{8}[^]]*\]`)
	undecodedExpression = regexp.MustCompile(` \[\S+ [0-9a-f]{8}\]`)
)

// decoded returns an opaque rule with the text that its label has of it, with empty quotes. known
// is false where an expression of nf_tables has no text, where one of these extensions has none, or
// without a label.
func (r Rule) decoded(without ...string) (text Rule, known bool) {
	label, ok := r.Readable()
	label = " " + quoted.ReplaceAllString(label, `""`)
	if !ok || undecodedExpression.MatchString(label) {
		return Rule{}, false
	}
	for _, found := range undecodedExtension.FindAllStringSubmatch(label, -1) {
		if slices.Contains(without, found[2]) {
			return Rule{}, false
		}
	}
	label = undecodedExtension.ReplaceAllString(label, "$1")
	return Rule{Spec: strings.TrimPrefix(label, " "), Target: r.Target}, true
}
