package api

import (
	"fmt"
	"strings"
	"time"
)

// An UnreadState is a stored file, in a Status, that cannot be read. It holds rules that were
// in force when the last canaryd ended.
type UnreadState struct {
	File   string    `json:"file"`
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since"`
	// Native means that it holds native tables. Table names the table, if that is known.
	Native bool   `json:"native,omitempty"`
	Table  string `json:"table,omitempty"`
	// Restore is the command that puts an older generation back; "" if there is none.
	Restore string `json:"restore,omitempty"`
	Dismiss string `json:"dismiss"` // the command that accepts the present rules
}

// UnreadText names the unreadable files, the reason and the remedy; "" if all can be read.
func (s Status) UnreadText() string {
	if len(s.StateUnread) == 0 {
		return ""
	}
	u := s.StateUnread[0]
	what := "the stored rules cannot be read"
	if u.Table != "" {
		what = fmt.Sprintf("the stored rules of table %s cannot be read", u.Table)
	}
	reason := strings.ReplaceAll(u.Reason, "\n", " ")
	if !strings.Contains(reason, u.File) {
		reason = joined(": ", u.File, reason)
	}
	text := fmt.Sprintf("%s (%s)", what, reason)
	if n := len(s.StateUnread); n > 1 {
		text += fmt.Sprintf(", nor %s", CountText(n-1, n, "other file"))
	}
	if u.Restore != "" {
		return fmt.Sprintf("%s: `%s` puts an older generation back, `%s` accepts the present rules", text, u.Restore, u.Dismiss)
	}
	return fmt.Sprintf("%s: have the owners write their rules, then `%s`", text, u.Dismiss)
}
