package daemon

import (
	"fmt"
	"slices"
	"strings"
)

// culpritsNamed is how many of a flush's culprits are named in a line.
const culpritsNamed = 2

// Takers returns those that took something; of a record of an earlier version, which
// has one only, that one.
func (f Flush) Takers() []Culprit {
	if len(f.Culprits) == 0 && f.Culprit.PID != 0 {
		return []Culprit{f.Culprit}
	}
	return f.Culprits
}

// ByText names the culprits in a few words: "nft (pid 3)", or "iptables, nft (+2)" where
// two more processes took something.
func (f Flush) ByText() string {
	list := f.Takers()
	switch {
	case len(list) == 0 || list[0].PID == 0:
		return "unknown"
	case len(list) == 1 && list[0].Comm == "":
		return list[0].name()
	case len(list) == 1:
		return fmt.Sprintf("%s (pid %d)", list[0].Comm, list[0].PID)
	}
	var names []string
	for _, c := range list {
		if name := c.name(); len(names) < culpritsNamed && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	text := strings.Join(names, ", ")
	if more := len(list) - len(names); more > 0 {
		text += fmt.Sprintf(" (+%d)", more)
	}
	return text
}

// TakersOf names those that took something from one table; "" if that is not known.
func (f Flush) TakersOf(t TableLoss) string {
	var names []string
	for _, c := range f.Culprits {
		if slices.Contains(t.By, c.PID) && !slices.Contains(names, c.name()) {
			names = append(names, c.name())
		}
	}
	return strings.Join(names, ", ")
}

// name is what the kernel calls the process or, if it ended before that could be looked
// up, its number.
func (c Culprit) name() string {
	if c.Comm == "" {
		return fmt.Sprintf("pid %d", c.PID)
	}
	return c.Comm
}

// culpritsText names the culprits for the log.
func culpritsText(f Flush) string {
	list := f.Takers()
	var words []string
	for _, c := range list[:min(len(list), culpritsNamed)] {
		words = append(words, culpritText(c))
	}
	if len(words) == 0 {
		return "unknown"
	}
	text := strings.Join(words, ", ")
	if more := len(list) - len(words); more > 0 {
		text += fmt.Sprintf(" (+%d)", more)
	}
	return text
}
