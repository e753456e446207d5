package api

import "time"

// A Failing is a replay that failed and is tried again, in a Status. It quotes no rule: the Detail
// of the flush record has the error in full.
type Failing struct {
	Flush    string    `json:"flush"` // the ID of the record
	Attempts int       `json:"attempts"`
	Retry    time.Time `json:"retry,omitzero"` // when canaryd tries again
	Reason   string    `json:"reason"`         // why the last try failed
	Advice   string    `json:"advice"`         // how an operator can help
}

// String explains why the rules are not back: "the replay fails: another process holds the
// xtables lock (...)".
func (f Failing) String() string { return "the replay fails: " + f.Reason + " (" + f.Advice + ")" }

// failingText explains why lost rules are not back, for the headline of Health; "" if no replay
// has failed.
func (s Status) failingText() string {
	text := ""
	for _, f := range s.Failing {
		text = joined("; ", text, f.String())
	}
	return text
}
