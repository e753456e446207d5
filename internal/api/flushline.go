package api

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/reload"
)

// EventFlush is the event of a FlushLine.
const EventFlush = "flush"

// KeptFlushes is how many flush records a Status has at most.
const KeptFlushes = 100

// LastsLong is how long a flush must last before it gets a FlushLine, unless it waits.
const LastsLong = 10 * time.Second

// A FlushLine is the line of JSON that canaryd run writes to its standard output for a flush.
// It is the record, behind a few fields of the line. It has counts of rules and names of
// chains, but no rule's text.
type FlushLine struct {
	Event string `json:"event"`          // "flush"
	Node  string `json:"node,omitempty"` // the Kubernetes node, or the host
	// Final means that the flush is over: no other line of the same ID follows.
	Final bool `json:"final"`
	// LeftOut counts the lines that were dropped before this one, because there were too many.
	LeftOut int `json:"leftOut,omitempty"`
	// Cut means that lists of the record were left out, because the line was too long.
	Cut bool `json:"cut,omitempty"`
	Flush
}

// MarshalJSON writes the line's own fields, and then the record's.
func (l FlushLine) MarshalJSON() ([]byte, error) {
	record, err := json.Marshal(l.Flush)
	if err != nil {
		return nil, err
	}
	type own struct {
		Event   string `json:"event"`
		Node    string `json:"node,omitempty"`
		Final   bool   `json:"final"`
		LeftOut int    `json:"leftOut,omitempty"`
		Cut     bool   `json:"cut,omitempty"`
	}
	line, err := json.Marshal(own{l.Event, l.Node, l.Final, l.LeftOut, l.Cut})
	if err != nil {
		return nil, err
	}
	return append(append(line[:len(line)-1], ','), record[1:]...), nil
}

// A Stage is how far a flush has got. Each stage except Fresh has one line.
type Stage int

// The stages.
const (
	Fresh  Stage = iota // it has no line yet
	Lasts               // the rules have been missing for long, or wait for a person
	Partly              // the rules are back, except for those in quarantine
	Over                // it is over
)

// Stage returns how far the flush has got. canaryd run writes a line for each stage after
// Fresh: a flush lasts (for LastsLong, or it waits), is back in part, or is over.
func (f Flush) Stage(now time.Time) Stage {
	switch {
	case f.Outcome == reload.Partial:
		return Partly
	case !f.Unanswered() && f.Outcome != AwaitingDecision:
		return Over
	case f.Outcome == WaitingOwner: // the record may be dropped: then it was no flush
		return Fresh
	case slices.Contains([]Outcome{Pending, WaitingLock, reload.Failed}, f.Outcome) && now.Sub(f.Time) < LastsLong:
		return Fresh
	}
	return Lasts
}

// Line returns the flush's line. It has no Detail, which may quote rules.
func (f Flush) Line(node string, stage Stage) FlushLine {
	f.Detail = ""
	return FlushLine{Event: EventFlush, Node: node, Final: stage == Over, Flush: f}
}

// Shorter returns the line without the record's longer lists and with Cut set, for a line that
// would be longer than canaryd writes.
func (l FlushLine) Shorter() FlushLine {
	const kept = 3
	short := func(c Culprit) Culprit {
		c.Command = c.Command[:min(len(c.Command), 100)]
		return c
	}
	l.Cut = true
	l.Writers, l.Pods, l.NotInBaseline, l.Policies = nil, nil, nil, l.Policies[:min(len(l.Policies), kept)]
	l.Culprit = short(l.Culprit)
	l.Culprits = changed(l.Culprits[:min(len(l.Culprits), kept)], func(c *Culprit) { *c = short(*c) })
	l.Lost.Tables = changed(l.Lost.Tables, func(t *TableLoss) {
		t.By, t.PerChain, t.More = nil, nil, 0
	})
	l.Native = changed(l.Native[:min(len(l.Native), kept)], func(n *NativeLoss) { n.Parts, n.More, n.By = nil, 0, nil })
	return l
}
