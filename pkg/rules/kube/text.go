package kube

import (
	"crypto/sha256"
	"encoding/base32"
	"math"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// comment begins a comment. Comments of kube-proxy's rules have a space or a slash, so
// iptables-save prints them in quotes.
const comment = ` -m comment --comment "`

// A text holds the words of all rules, and the slices of rules, in a few large pieces of
// memory. A separate allocation for each of 60,000 rules would take as long as the writing.
type text struct {
	b       *strings.Builder
	rules   []rules.Rule // room that list has not used yet
	scratch []byte
}

const piece = 64 << 10

// join returns the parts as one string, in a large piece of memory that many rules share.
func (t *text) join(parts ...string) string {
	length := 0
	for _, p := range parts {
		length += len(p)
	}
	t.room(length)
	start := t.b.Len()
	for _, p := range parts {
		t.b.WriteString(p)
	}
	return t.b.String()[start:]
}

// room makes room for that many bytes, for join and chain: behind the text so far, which
// never moves, or in a new piece.
func (t *text) room(length int) {
	if t.b == nil || t.b.Cap()-t.b.Len() < length {
		t.b = &strings.Builder{}
		t.b.Grow(max(piece, length))
	}
}

// rule returns the rule with the words of parts. Each part begins with a space, so rule cuts
// off the first space.
func (t *text) rule(target string, parts ...string) rules.Rule {
	return rules.Rule{Spec: t.join(parts...)[1:], Target: target}
}

// jump returns the rule that jumps to target if the parts match. The text of parts begins
// with a space, which the rule does not have.
func (t *text) jump(target string, parts ...string) rules.Rule {
	var all [16]string
	words := append(append(all[:0], parts...), " -j ", target)
	return rules.Rule{Spec: t.join(words...)[1:], Target: target}
}

// chain returns the name of a chain, as kube-proxy makes it: the prefix, and a hash of the
// chain's purpose. of is the service's port, its protocol and, for an endpoint, its address.
func (t *text) chain(prefix string, of ...string) string {
	t.scratch = t.scratch[:0]
	for _, part := range of {
		t.scratch = append(t.scratch, part...)
	}
	sum := sha256.Sum256(t.scratch)
	var name [hashLength]byte
	base32.StdEncoding.Encode(name[:], sum[:hashLength*5/8])
	t.room(len(prefix) + hashLength)
	start := t.b.Len()
	t.b.WriteString(prefix)
	t.b.Write(name[:])
	return t.b.String()[start:]
}

// list returns an empty list with room for n rules, as one piece of a larger allocation. An
// append beyond n copies it.
func (t *text) list(n int) []rules.Rule {
	if len(t.rules) < n {
		t.rules = make([]rules.Rule, max(n, 1024))
	}
	list := t.rules[:0:n]
	t.rules = t.rules[n:]
	return list
}

// probability returns the match that holds once in n times, as iptables-save prints it.
// kube-proxy writes ten digits, the kernel keeps 31 bits (xt_statistic), and iptables prints
// them as eleven digits.
func probability(n int) string {
	written := math.Round(1e10/float64(n)) / 1e10
	kept := math.Round(written * (1 << 31))
	return " -m statistic --mode random --probability " + strconv.FormatFloat(kept/(1<<31), 'f', 11, 64)
}

// mark returns the mark with a single bit, as iptables prints it.
func mark(bit int) string { return "0x" + strconv.FormatUint(1<<uint(bit), 16) }
