package rules

import (
	"regexp"
	"slices"
	"strings"
)

// This file reads labels (ruleset.Label). A rule has one if canaryd knows it by its bytes and
// decodes it in part. An extension that is not decoded is printed as "-m NAME [DIGEST]" or "-j
// NAME [DIGEST]", with the names of its ipsets behind the digest. An expression of nf_tables is
// printed as "[NAME DIGEST]". Quoted text is ignored: a comment may look like such a name, or
// like the beginning of a name that ends behind the next quote.
var (
	quoted              = regexp.MustCompile(`"(\\.|[^"\\])*"`)
	undecodedExtension  = regexp.MustCompile(`( -[mj] (\S+)) \[[0-9a-f]{8}[^]]*\]`)
	undecodedExpression = regexp.MustCompile(` \[\S+ [0-9a-f]{8}\]`)
)

// decoded returns an opaque rule with the text of its label, in which quotes are empty, for
// MarkLoss and markTests. known is false without a label, or if an expression of nf_tables
// or an extension in without has no text.
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
