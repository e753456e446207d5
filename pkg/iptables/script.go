package iptables

import (
	"bufio"
	"cmp"
	"io"
	"slices"
	"strconv"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Payload is the content of one Restore: for each family the scripts of its tables, in the
// order in which they are written. Restore does not touch other families.
type Payload map[rules.Family][]Script

// A Script is the change of one table, which is done completely or not at all. It has the
// meaning of its text for "iptables-restore --noflush": see WriteTo.
type Script struct {
	Table rules.TableName
	// Declare are user's chains that are created, or emptied if they exist, before the first
	// Step. Their order has no meaning.
	Declare []string
	Steps   []Step
	// AsText has iptables-restore write the script even if its bytes are known.
	AsText bool
	// ByMarks lets a Restore write the script although other processes commit meanwhile, if all
	// marks that it deletes are still there. On nft their handles show that, in the transaction.
	// Otherwise the script is stale. The xtables lock needs no such exception.
	ByMarks bool
}

// byMarks reports whether the scripts of a payload are ByMarks; all are, or none.
func (p Payload) byMarks() bool {
	for _, scripts := range p {
		return scripts[0].ByMarks
	}
	return false
}

// A Verb is the action of a Step, by the letter of iptables' command.
type Verb byte

// The verbs.
const (
	Append Verb = 'A'
	Insert Verb = 'I'
	Delete Verb = 'D'
	Flush  Verb = 'F' // empties the chain
	Drop   Verb = 'X' // deletes the empty chain
)

// A Step is one command of a Script. A Step that cannot be done fails the whole Script.
type Step struct {
	Verb  Verb
	Chain string
	// Index is the position at which Insert puts the rule (0 means at the top). For Delete it is
	// the rule to remove (0 means the first with the same meaning as Rule). It counts from 1,
	// after the earlier steps of the Script.
	Index int
	Rule  rules.Rule // of Append, Insert, and Delete without an Index
}

// Empty reports whether the script does nothing.
func (s *Script) Empty() bool { return len(s.Declare) == 0 && len(s.Steps) == 0 }

// WriteTo writes the script as input of "iptables-restore --noflush".
//
// WriteTo declares chains in descending order of their names. iptables-nft-restore inserts each
// into a sorted list, which it searches from the top: 2.1 s instead of 7.4 s at 5,000 services
// (iptables 1.8.9).
func (s *Script) WriteTo(out io.Writer) (int64, error) {
	w := scriptWriter{buf: bufio.NewWriterSize(out, 64<<10)}
	w.words("*", string(s.Table), "\n")
	declared := slices.Clone(s.Declare)
	slices.SortFunc(declared, func(a, b string) int { return cmp.Compare(b, a) })
	for _, name := range declared {
		w.words(":", name, " - [0:0]\n")
	}
	for i := range s.Steps {
		w.step(&s.Steps[i])
	}
	w.words("COMMIT\n")
	if err := w.buf.Flush(); err != nil {
		return w.written, err
	}
	return w.written, nil
}

// A scriptWriter counts the written bytes. Errors stay in buf until its Flush.
type scriptWriter struct {
	buf     *bufio.Writer
	written int64
}

// words writes words one after the other, for WriteTo and step.
func (w *scriptWriter) words(words ...string) {
	for _, word := range words {
		n, _ := w.buf.WriteString(word)
		w.written += int64(n)
	}
}

// step writes the line of one step, for WriteTo.
func (w *scriptWriter) step(s *Step) {
	w.words("-", string(s.Verb), " ", s.Chain)
	if s.Index > 0 {
		w.words(" ", strconv.Itoa(s.Index))
	}
	if s.Rule.Spec != "" && (s.Verb != Delete || s.Index == 0) {
		w.words(" ", s.Rule.Spec)
	}
	w.words("\n")
}
