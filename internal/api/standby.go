package api

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A StandbyState is the state of the standby for a family.
type StandbyState string

// The states of a family's standby.
const (
	// StandbyOff is the state with --standby=off, on legacy, in observe mode, after a cleanup,
	// or with --standby=auto without its sockets.
	StandbyOff StandbyState = "off"
	// StandbyIdle means that none is needed, because no protected rule translates or a replay
	// is short.
	StandbyIdle StandbyState = "idle"
	// StandbyBuilding means that the copy is not complete yet.
	StandbyBuilding StandbyState = "building"
	// StandbyArmed means that the copy is complete, and translates nothing.
	StandbyArmed StandbyState = "armed"
	// StandbyBehind means that the copy is armed, and lacks changes of nat.
	StandbyBehind StandbyState = "behind"
	// StandbyOpen means that the copy translates in the place of missing rules.
	StandbyOpen StandbyState = "open"
	// StandbyUnavailable means that the kernel refuses it, or that a rule cannot be copied.
	// canaryd tries again, unless it could open no socket of nf_tables on legacy.
	StandbyUnavailable StandbyState = "unavailable"
)

// StandbyStates returns every StandbyState.
func StandbyStates() []StandbyState {
	return []StandbyState{StandbyOff, StandbyIdle, StandbyBuilding, StandbyArmed, StandbyBehind, StandbyOpen, StandbyUnavailable}
}

// A FamilyStandby is the standby's state for one family or native table, in a Status.
type FamilyStandby struct {
	State StandbyState `json:"state"`
	// Reason is why the standby is unavailable, off or idle. It names no rule.
	Reason string `json:"reason,omitempty"`
	// OpenSince is when it began to translate; zero unless State is StandbyOpen.
	OpenSince time.Time `json:"openSince,omitzero"`
	// Chains counts the chains of the copy. Uncopied counts its chains that only accept
	// packets, untranslated, because some of their rules cannot be copied.
	Chains   int `json:"chains,omitempty"`
	Uncopied int `json:"uncopied,omitempty"`
	// Outstanding is how many changed chains the copy does not have yet.
	Outstanding int `json:"outstanding,omitempty"`
}

// A StandbyUse is the standby's translation in the place of lost rules, in a flush record.
type StandbyUse struct {
	Families []rules.Family `json:"families"`
	// Tables are the native tables, such as "ip kube-proxy".
	Tables []string `json:"tables,omitempty"`
	// AfterSeconds is the time from the record's first evidence until the first family or table
	// was translated.
	AfterSeconds float64 `json:"afterSeconds"`
	// OpenSeconds is the longest time that it translated a family or table; 0 while it does.
	OpenSeconds float64 `json:"openSeconds,omitempty"`
}

// With returns the use with one more family, also if u is nil. after is the time from the first
// evidence of the loss until the standby translated. Flush records show the use; the first
// family's time counts.
func (u *StandbyUse) With(f rules.Family, after time.Duration) *StandbyUse {
	if u == nil {
		return &StandbyUse{Families: []rules.Family{f}, AfterSeconds: after.Seconds()}
	}
	if slices.Contains(u.Families, f) {
		return u // shut in a pause, and opened again
	}
	more := *u
	more.Families = append(append([]rules.Family{}, u.Families...), f)
	return &more
}

// WithTable returns the use with one more native table, also if u is nil. after is as for With.
func (u *StandbyUse) WithTable(table string, after time.Duration) *StandbyUse {
	if u == nil {
		return &StandbyUse{Families: []rules.Family{}, Tables: []string{table}, AfterSeconds: after.Seconds()}
	}
	if slices.Contains(u.Tables, table) {
		return u
	}
	more := *u
	more.Tables = append(slices.Clone(u.Tables), table)
	return &more
}

// Later returns the use in a record that begins earlier than it did before, by that much.
func (u *StandbyUse) Later(earlier time.Duration) *StandbyUse {
	if u == nil {
		return nil
	}
	later := *u
	later.AfterSeconds += earlier.Seconds()
	return &later
}

// Ended returns the use after the standby was shut for a family that it translated for so long.
// The record keeps the longest time. nil stays nil: the standby was not open.
func (u *StandbyUse) Ended(open time.Duration) *StandbyUse {
	if u == nil {
		return nil
	}
	ended := *u
	ended.OpenSeconds = max(u.OpenSeconds, open.Seconds())
	return &ended
}

// Text describes the translation in a few words: "translated by the standby (ipv4) after 3 ms".
func (u *StandbyUse) Text() string {
	if u == nil {
		return ""
	}
	names := Words(u.Families)
	for _, t := range u.Tables {
		names = append(names, "table "+t)
	}
	text := fmt.Sprintf("translated by the standby (%s) after %s", strings.Join(names, ", "), Seconds(u.AfterSeconds).Round(100*time.Microsecond))
	if u.OpenSeconds > 0 {
		text += fmt.Sprintf(", for %s", Seconds(u.OpenSeconds).Round(100*time.Microsecond))
	}
	return text
}

// text describes the state; ago words the time since then.
func (s FamilyStandby) text(ago func(time.Time) string) string {
	var more []string
	if s.Reason != "" {
		more = append(more, s.Reason)
	}
	if !s.OpenSince.IsZero() {
		more = append(more, "since "+ago(s.OpenSince))
	}
	if s.Outstanding > 0 {
		more = append(more, counted(s.Outstanding, "changed chain", strconv.Itoa)+" outstanding")
	}
	if s.Uncopied > 0 {
		more = append(more, fmt.Sprintf("%d of %d chains not copied", s.Uncopied, s.Chains))
	}
	text := string(s.State)
	if len(more) > 0 {
		text += " (" + strings.Join(more, "; ") + ")"
	}
	return text
}

// isNone reports whether there is no standby because none is needed or wanted.
func (s FamilyStandby) isNone() bool { return s.State == StandbyOff || s.State == StandbyIdle }

// StandbyText describes the standby of each family and native table in one line; "" if none
// exists and none is needed. ago words the time since then.
func (s Status) StandbyText(ago func(time.Time) string) string {
	var words []string
	none := true
	for f, standby := range InOrder(s.Standby) {
		words = append(words, f.String()+" "+standby.text(ago))
		none = none && standby.isNone()
	}
	for _, t := range s.Native {
		if t.Standby != nil {
			words = append(words, "table "+TableCell(t.Table)+" "+t.Standby.text(ago))
			none = none && t.Standby.isNone()
		}
	}
	if none {
		return ""
	}
	return strings.Join(words, ", ")
}
