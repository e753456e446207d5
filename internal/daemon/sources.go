package daemon

import (
	"fmt"
	"strings"
	"time"
)

// A SourceError is what is wrong with the files of a declared source, in a Status.
// Reason may quote a file and leaves through the control socket only.
type SourceError struct {
	Source string    `json:"source"` // manifest or rules-dir
	Where  string    `json:"where"`  // file and line, or as much as is known
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since"`
	// InForce is what counts in the place of what the files say.
	InForce Instead `json:"inForce"`
}

// Instead says what counts while a source's files cannot be used.
type Instead string

// What may count while files cannot be used.
const (
	LastGood   Instead = "last_good" // what the files said before
	StoredGood Instead = "stored"    // what they said to an earlier run
	NoneGood   Instead = "nothing"   // nothing: what they said is not known
	AllButThis Instead = "rest"      // all of them but this document
)

// whole reports whether none of the source's files can be used.
func (e SourceError) whole() bool { return e.InForce != AllButThis }

// line says in one line what is broken. It quotes nothing of a file.
func (e SourceError) line() string {
	if !e.whole() {
		return fmt.Sprintf("%s: a document in %s declares nothing, the rest of its file counts", e.Source, e.Where)
	}
	return fmt.Sprintf("%s cannot be used because of %s: %s", e.Source, e.Where, map[Instead]string{
		LastGood:   "what it said before stays in force",
		StoredGood: "what it said to an earlier run of canaryd is in force",
		NoneGood:   "what it declares is not known, and not in force",
	}[e.InForce])
}

// brokenSource returns why declared rules are not those that the files hold, nil if
// they are.
func (s Status) brokenSource() error {
	for _, e := range s.SourceErrors {
		if e.whole() {
			return fmt.Errorf("%s", e.line())
		}
	}
	return nil
}

// sourceWarning is for the page: what is wrong with files that the headline does not
// have.
func sourceWarning(s Status) []pageWarning {
	var lines []string
	for _, e := range s.SourceErrors {
		lines = append(lines, upper(e.line()))
	}
	if len(lines) == 0 {
		return nil
	}
	const shown = 5
	if n := len(lines) - shown; n > 0 {
		lines = append(lines[:shown], fmt.Sprintf("And %d more", n))
	}
	return []pageWarning{{Name: "sources", Class: "bad", Title: "Files that declare rules have errors.",
		Text: strings.Join(lines, ". ") + ". The reasons:", Command: "canaryd status"}}
}
