package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A ruleShape holds the facts in the bytes of a rule of x_tables that its text must have, too: each
// rule has them at a known place. Names are printed as they are, without quotes; a name with a
// space in it can look like options, and only the bytes say which.
type ruleShape struct {
	in, out  string   // interfaces as iptables prints them; empty for none
	matches  []string // their names in order
	target   string   // empty for none, or if the bytes do not say
	noTarget bool     // it is certain that there is none
	comments []string
	// odd says why the rule has no text that may be written back, whatever iptables prints.
	odd      string
	identity rules.Identity // names the rule if it is opaque
	// base has the bytes that all rules of the same printed words share, and kinds are the names
	// and revisions of its extensions. plain: iptables prints all that the bytes say. content names
	// the bytes of a rule that names an ipset. everyIn and everyOut: it has an interface of no
	// letters, inverted. iptables 1.8.11 prints it as +, 1.8.9 not at all; a trial finds out where
	// the text leads to.
	base, kinds       []byte
	plain             bool
	everyIn, everyOut bool
	content           xtKey
	exact             []byte // to write the rule by, with a jump to goal; nil if it cannot be
	goal              string
}

var errPair = errors.New("the text is of another rule")

// agrees returns why a text is not this rule's, or nil.
func (s *ruleShape) agrees(rule rules.Rule) error {
	if s.odd != "" {
		return fmt.Errorf("%w: %s", errPair, s.odd)
	}
	if reason, opaque := rule.Opaque(); opaque {
		return errors.New(reason)
	}
	words, err := rule.Words()
	if err != nil {
		return err
	}
	target := s.target
	if target == "CT" && rule.Target == "NOTRACK" { // two words for one
		target = rule.Target
	}
	if (s.target != "" || s.noTarget) && target != rule.Target {
		return fmt.Errorf("%w: it goes to %q, not to %q", errPair, rule.Target, s.target)
	}
	printed := readPrinted(words)
	switch {
	case !isPrinted(printed.in, s.in, s.everyIn) || !isPrinted(printed.out, s.out, s.everyOut):
		return fmt.Errorf("%w: its interfaces are %q and %q, not %q and %q", errPair, printed.in, printed.out, s.in, s.out)
	case len(s.comments) > 0 && !slices.Equal(printed.comments, s.comments):
		return fmt.Errorf("%w: its comments are %q, not %q", errPair, printed.comments, s.comments)
	case !slices.Equal(printed.matches, s.matches):
		return fmt.Errorf("%w: its matches are %q, not %q", errPair, printed.matches, s.matches)
	}
	return nil
}

// isPrinted reports whether iptables may print such an interface of a rule with this one.
func isPrinted(printed, iface string, every bool) bool {
	return printed == iface || every && printed == "+"
}

// readPrinted reads the words of a rule as iptables prints it: options of no extension come
// first, then the matches, then the target.
func readPrinted(words []string) ruleShape {
	var s ruleShape
	i := 0
	for ; i+1 < len(words); i++ {
		switch words[i] {
		case "!", "-f":
			continue
		case "-i":
			s.in = words[i+1]
		case "-o":
			s.out = words[i+1]
		case "-s", "-d", "-p":
		default:
			return s.readMatches(words[i:])
		}
		i++
	}
	return s
}

// readMatches reads what stands behind the options of no extension. One of them here makes the
// text none that iptables prints, and its interfaces others.
func (s ruleShape) readMatches(words []string) ruleShape {
	for i := 0; i+1 < len(words); i++ {
		switch words[i] {
		case "-m":
			i++
			s.matches = append(s.matches, matchName(words[i]))
		case "--comment":
			i++
			s.comments = append(s.comments, words[i])
		case "--log-prefix", "--nflog-prefix", "--string", "--hex-string":
			i++ // the next word is free text, not an option
		case "-j", "-g":
			return s
		case "-i":
			s.in += " " + words[i+1]
		case "-o":
			s.out += " " + words[i+1]
		}
	}
	return s
}

// interfaceName returns the name of an interface as iptables prints it. Odd is set if it would be
// read back as another one.
func interfaceName(value []byte, whole bool, odd *string) string {
	bare := string(nft.UntilNUL(value))
	name := bare
	if !whole {
		name += "+"
	}
	reason := oddName(bare)
	switch {
	case reason != "":
	case len(bytes.Trim(value[len(bare):], "\x00")) > 0:
		reason = fmt.Sprintf("(%q) has something behind its end", value)
	case whole && (bare == "" || bare[len(bare)-1] == '+'):
		reason = fmt.Sprintf("(%q) is printed like the beginning of others", bare)
	}
	if reason != "" && *odd == "" {
		*odd = "the name of an interface " + reason
	}
	return name
}

// matchName returns one name for the matches that iptables prints by two.
func matchName(name string) string {
	if name == "state" {
		return "conntrack"
	}
	return name
}
