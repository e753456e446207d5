package protect

import (
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/owners"
)

// Auto is the word of --protect for all owners that have a preset. Their chains, rules and
// native tables have distinctive names, so a node's content shows its owners. An owner that is
// not on the node has nothing to guard. The first rules of an owner that appears later are
// captured like any other new rule.
const Auto = "auto"

// leaveOut begins a word that takes one owner out of Auto: "-docker".
const leaveOut = "-"

// Auto reports whether the selector has all owners that have a preset, except owners that are
// left out by name.
func (s Selector) Auto() bool { return s.auto }

// rowsOf returns the rows of the table of owners that a word of list names; nil if the word names
// no owner.
func rowsOf(word string, list []string) []owners.Owner {
	if word != Auto {
		return owners.Named(word)
	}
	var rows []owners.Owner
	for _, o := range owners.All() {
		if o.Preset != "" && !isLeftOut(o, list) {
			rows = append(rows, o)
		}
	}
	return rows
}

// isLeftOut reports whether a word of list, such as -docker, takes the owner out of Auto.
func isLeftOut(o owners.Owner, list []string) bool {
	return slices.ContainsFunc(list, func(word string) bool {
		left, is := strings.CutPrefix(strings.TrimSpace(word), leaveOut)
		return is && slices.ContainsFunc(owners.Named(left), func(n owners.Owner) bool { return n.Name == o.Name })
	})
}

// checkLeftOut returns why a word that begins with "-" leaves out no owner of list; nil if
// it does. NewSelector returns the error. iptables refuses chain names with this beginning,
// so the word cannot name a chain.
func checkLeftOut(word string, list []string) error {
	left, auto, again := strings.TrimPrefix(word, leaveOut), false, ""
	for _, w := range list {
		w = strings.TrimSpace(w)
		auto = auto || w == Auto
		if slices.ContainsFunc(owners.Named(w), func(o owners.Owner) bool { return isLeftOut(o, []string{word}) }) {
			again = w
		}
	}
	switch {
	case len(owners.Named(left)) == 0:
		return fmt.Errorf("%q leaves out no owner: %q is no preset (%s)", word, left, strings.Join(PresetNames(), ", "))
	case !auto:
		return fmt.Errorf("%q leaves an owner out of auto, which is not named: name the owners that are to be guarded, or auto,%s", word, word)
	case again != "":
		return fmt.Errorf("%q and %q contradict each other", again, word)
	}
	return nil
}
