package web

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A pageRecord is a flush record in the words of the page.
type pageRecord struct {
	api.Flush
	Where, Absent, Noticed  string
	LostFirst, LostRest     string // the counts of the loss, the first one separate
	Class                   string // of its outcome
	KindMeans, OutcomeMeans string
	Groups                  []pageGroup
}

// A pageGroup is the loss of one table, with as many chains as the page shows.
type pageGroup struct {
	api.TableLoss
	By string // the processes that removed it
}

// recordOf returns a flush record for a page that shows this many of iptables' tables: a flush
// of all of them says "all tables". Long lists of chains are cut.
func recordOf(f api.Flush, shown int, now time.Time) pageRecord {
	r := pageRecord{Flush: f, Absent: absentText(f, now), Noticed: noticedText(f), Class: outcomeClass(f.Outcome),
		KindMeans: kindMeanings[f.Kind], OutcomeMeans: outcomeMeanings[f.Outcome]}
	r.LostFirst, r.LostRest, _ = strings.Cut(f.Lost.Text(countText), ", ")
	families, tables, native := f.Where()
	if len(tables) == shown {
		tables = []string{"all tables"}
	}
	r.Where = strings.TrimSpace(strings.Join(families, "+") + " " + strings.Join(append(tables, native...), ", "))
	hit := f.TablesHit()
	for _, t := range hit {
		g := pageGroup{TableLoss: t, By: f.TakersOf(t)}
		if shown := chainsShown / len(hit); len(t.PerChain) > shown {
			g.PerChain, g.More = t.PerChain[:shown], t.More+len(t.PerChain)-shown
		}
		r.Groups = append(r.Groups, g)
	}
	return r
}

// noticedText returns the time from the flush to its verdict, "at most" if only a bound is
// known.
func noticedText(f api.Flush) string {
	noticed, bound := f.NoticedFor()
	if bound {
		return "at most " + durationText(noticed)
	}
	return durationText(noticed)
}

// absentText returns how long the rules were missing, or have been missing so far, in words for
// the page.
func absentText(f api.Flush, now time.Time) string {
	absent, known := f.AbsentFor(now)
	switch {
	case f.Requested():
		return "nothing is missing"
	case !known:
		return "unknown"
	}
	text := durationText(absent)
	if f.Bound() {
		text = "at most " + text
	}
	if f.Open() {
		text += " so far"
	}
	if f.Standby != nil {
		text += " (standby after " + durationText(api.Seconds(f.Standby.AfterSeconds)) + ")"
	}
	return text
}

// outcomeClass returns the CSS class of an outcome: good if the rules are proved to be back,
// warn after a race. It is dull if there was nothing to put back, and else bad.
func outcomeClass(o api.Outcome) string {
	switch o {
	case reload.Proved, api.Drilled:
		return "good"
	case reload.Raced:
		return "warn"
	case reload.Skipped, api.OwnersDecision, api.Interrupted, api.Requested, api.Dismissed:
		return "dull"
	default:
		return "bad"
	}
}

// A pageStrip shows the times of the flushes from left to right.
type pageStrip struct {
	Span  string // the age of its left end
	Ticks []pageTick
}

// A pageTick is one flush; X is in percent.
type pageTick struct{ Class, X string }

// spans are the lengths that a strip may have.
var spans = []struct {
	length time.Duration
	name   string
}{{10 * time.Minute, "10 minutes ago"}, {time.Hour, "1 hour ago"}, {6 * time.Hour, "6 hours ago"}, {24 * time.Hour, "24 hours ago"},
	{7 * 24 * time.Hour, "7 days ago"}, {30 * 24 * time.Hour, "30 days ago"}, {365 * 24 * time.Hour, "1 year ago"}}

// stripOf returns the shortest strip (timeline) that shows all records, newest first. A tick's
// place is in percent of its width.
func stripOf(records []pageRecord, now time.Time) pageStrip {
	if len(records) == 0 {
		return pageStrip{}
	}
	oldest := now.Sub(records[len(records)-1].Time)
	span := spans[len(spans)-1]
	for _, s := range spans {
		if oldest <= s.length {
			span = s
			break
		}
	}
	strip := pageStrip{Span: span.name}
	for _, r := range slices.Backward(records) {
		x := 100 * (1 - now.Sub(r.Time).Seconds()/span.length.Seconds())
		strip.Ticks = append(strip.Ticks, pageTick{r.Class, strconv.FormatFloat(min(100, max(0, x)), 'f', 2, 64)})
	}
	return strip
}

// durationText returns a duration for people, with at least two digits.
func durationText(d time.Duration) string {
	switch {
	case d <= 0:
		return "0 s"
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", d.Seconds()*1e3)
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	default:
		return spanText(d)
	}
}

// spanText returns a duration in one unit.
func spanText(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	default:
		return fmt.Sprintf("%d days", int(d.Hours()/24))
	}
}

// agoText words the time since t, in one unit; "just now" below a second.
func agoText(t, now time.Time) string {
	if d := now.Sub(t); d >= time.Second {
		return spanText(d) + " ago"
	}
	return "just now"
}

// clockText returns the time of day, with the date if it is not today's.
func clockText(t, now time.Time) string {
	if t, now := t.UTC(), now.UTC(); t.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return t.Format("15:04:05 MST")
	}
	return utcText(t)
}

// isoText returns a time in the form that programs read.
func isoText(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// utcText returns a date and time for people.
func utcText(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 MST") }

// countText returns 62590 as 62,590.
func countText(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
