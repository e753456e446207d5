package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A ruleShape holds the facts in an x_tables rule's bytes that its text must have, too. Each
// rule has them at a known place. iptables prints names without quotes. A name with a space in
// it can look like options, and only the bytes show which it is.
type ruleShape struct {
	in, out  string   // interfaces as iptables prints them; empty for none
	matches  []string // their names in order
	target   string   // empty for none, or if the bytes do not show it
	noTarget bool     // there is certainly none
	comments []string
	// odd is the reason why the rule has no text that may be written back, whatever iptables
	// prints.
	odd      string
	identity rules.Identity // identifies the rule if it is opaque
	// base has the bytes that all rules with the same printed words share, and kinds has the
	// names and revisions of its extensions. plain reports that iptables prints everything in
	// the bytes. content identifies the bytes of a rule that names an ipset. everyIn and
	// everyOut report an inverted interface with an empty name. iptables 1.8.11 prints it as +,
	// 1.8.9 not at all; a trial shows the bytes behind the text.
	base, kinds       []byte
	plain             bool
	everyIn, everyOut bool
	content           xtKey
	exact             []byte // to write the rule, with a jump to goal; nil if it cannot be
	goal              string
}

var errPair = errors.New("the text is of another rule")

// agrees returns the reason why a text is not this rule's, or nil. doubt makes the rule opaque
// then, and untried does not try the text.
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

// isPrinted reports whether iptables may print a rule's interface like this.
func isPrinted(printed, iface string, every bool) bool {
	return printed == iface || every && printed == "+"
}

// readPrinted reads the words of a rule as iptables prints it, for agrees: first options of no
// extension, then the matches, then the target. Of the shape it sets interfaces, matches and
// comments.
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

// readMatches adds the matches and comments before the target, for readPrinted. iptables prints
// -i and -o before all matches, so here they are part of a name with spaces. It adds them to
// the interfaces, so that agrees refuses the text.
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

// interfaceName returns the name of an interface as iptables prints it. whole says that the
// name does not continue with +. It sets odd, if that is "" yet, if iptables would read back
// another name: then the rule has no text. printedInterface calls it.
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

// matchName returns a common name for matches that iptables prints under two names: the
// kernel's match conntrack may be printed as state. The shape of a rule's bytes and the shape
// of its text both use it, so that agrees accepts the text.
func matchName(name string) string {
	if name == "state" {
		return "conntrack"
	}
	return name
}
