package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A nativeChapter has the ledger's facts about one chain or set of an owner.
type nativeChapter struct {
	versions []string // the owner's contents, in order
	captured int      // the version that canaryd has claimed to know, or -1
	// excused is the reason why canaryd may not know the newest version, or "".
	excused string
	// halves are contents that the owner never wrote, and the reasons why canaryd may learn them.
	halves map[string]string
}

func (c *nativeChapter) newest() string { return c.versions[len(c.versions)-1] }

func (c *nativeChapter) find(text string) int {
	for i, v := range slices.Backward(c.versions) {
		if v == text {
			return i
		}
	}
	return -1
}

// A nativeTaking is a deed of a process on an owner's table that is not of the owner's will.
type nativeTaking struct {
	at      time.Time
	pid     uint32
	byOwner bool
}

// A nativeLedger records the writes of all programs, and finds forbidden writes of canaryd.
type nativeLedger struct {
	w        *nativeStory
	chapters map[tableid.TableID]map[string]*nativeChapter
	last     map[tableid.TableID]*native.Table
	// harmed are the parts that a flusher took, until they have the newest content.
	harmed  map[tableid.TableID]map[string]time.Duration
	takings map[tableid.TableID][]nativeTaking
	// filed are tables that a saved file has written, until the next rest.
	filed map[tableid.TableID]bool
	// outage are tables that a flush has taken since canaryd last claimed to know everything.
	outage map[tableid.TableID]bool
	// made are the times, by awake, when owners made their tables.
	made       map[tableid.TableID]time.Duration
	blind      bool // canaryd misses commits now
	wasBlind   bool // it has missed some since it last claimed to know everything
	violations []string
	excuses    map[string]int
}

func (l *nativeLedger) violation(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	l.violations = append(l.violations, text)
	l.w.budget = 0 // the rest of the story shows nothing
	l.w.tell("VIOLATION: %s", text)
}

func (l *nativeLedger) chapter(id tableid.TableID, part string) *nativeChapter {
	if l.chapters[id] == nil {
		l.chapters[id] = map[string]*nativeChapter{}
	}
	c := l.chapters[id][part]
	if c == nil {
		c = &nativeChapter{versions: []string{absent}, captured: -1}
		l.chapters[id][part] = c
	}
	return c
}

// all returns the parts of a table as its owner wants it, with the parts that it lacks.
func (l *nativeLedger) all(id tableid.TableID, wanted *native.Table) map[string]string {
	touched := partsOf(wanted)
	for p := range l.chapters[id] {
		if _, has := touched[p]; !has {
			touched[p] = absent
		}
	}
	return touched
}

// eachChange calls f for each part of a table that differs from the last observation.
func (l *nativeLedger) eachChange(f func(id tableid.TableID, part, was, is string)) {
	now := map[tableid.TableID]*native.Table{}
	l.w.k.with(func() { maps.Copy(now, l.w.k.tables) })
	ids := map[tableid.TableID]bool{}
	for id := range now {
		ids[id] = true
	}
	for id := range l.last {
		ids[id] = true
	}
	for _, id := range slices.SortedFunc(maps.Keys(ids), tableid.TableID.Compare) {
		if now[id] == l.last[id] {
			continue
		}
		before, after := partsOf(l.last[id]), partsOf(now[id])
		for p := range after {
			if _, had := before[p]; !had {
				before[p] = absent
			}
		}
		for _, p := range slices.Sorted(maps.Keys(before)) {
			is, has := after[p]
			if !has {
				is = absent
			}
			if before[p] != is {
				f(id, p, before[p], is)
			}
		}
	}
	l.last = now
}

// wrote notes a transaction of an owner, with the contents that it meant. half: it made a flushed
// table again, but only the touched parts of it. canaryd cannot tell the others from removed parts.
func (l *nativeLedger) wrote(o *nativeOwner, touched map[string]string, half bool) {
	removes := false
	outage := len(l.harmed[o.id]) > 0 || l.outage[o.id] && (o.kind == remakes || len(touched) < len(l.chapters[o.id]))
	for p, text := range touched {
		c := l.chapter(o.id, p)
		if outage && c.captured != len(c.versions)-1 {
			c.excuse(inOutage)
		}
		if c.newest() == text {
			continue
		}
		removes = removes || text == absent || text == "{}"
		c.versions = append(c.versions, text)
		switch {
		case l.blind:
			c.excused = notHeard
		case outage:
			c.excused = inOutage
		}
	}
	if was, now := l.last[o.id], l.w.k.standing(o.id); now != nil && (was == nil || was.Handle != now.Handle) {
		l.made[o.id] = l.w.awake()
	}
	if removes {
		l.takings[o.id] = append(l.takings[o.id], nativeTaking{time.Now(), o.pid, true})
	}
	l.eachChange(func(id tableid.TableID, p, _, is string) { l.heal(id, p, is) })
	now := partsOf(l.last[o.id])
	for p, text := range touched { // a set with a part of its elements leads to a part of the chains
		half = half || text != absent && now[p] != text
		if _, has := now[p]; has && text == absent {
			l.chapter(o.id, p).excuse("its owner listed the table before canaryd put it back")
		}
	}
	for p, c := range l.chapters[o.id] {
		if half {
			c.excused = halfWritten
			c.half(cmp.Or(now[p], absent), halfWritten)
		}
	}
}

// unreached excuses a chain to which nothing led when it was flushed: its owner may have done that.
const unreached = "no packet reached it"

func isUnreached(t *native.Table, chain string) bool {
	return t != nil && t.Chain(chain) != nil && !t.Chain(chain).Base && !targetsIn(t)[chain]
}

// notHeard excuses versions that canaryd may never have heard of.
const notHeard = "its notification was missed"

// inOutage excuses versions that canaryd may learn only by a read after the replay.
const inOutage = "it was written between a flush and its replay"

// halfWritten excuses all content of a part.
const halfWritten = "its owner wrote a part of it after a flush"

// heal notes that a part has its newest content.
func (l *nativeLedger) heal(id tableid.TableID, part, is string) {
	if is == l.chapter(id, part).newest() {
		delete(l.harmed[id], part)
	}
}

// took notes a flush. file: it wrote older tables.
func (l *nativeLedger) took(pid uint32, file bool) {
	before := l.last
	if file {
		l.w.k.with(func() {
			for id, t := range l.w.k.tables {
				for p, is := range partsOf(t) {
					if l.w.guards(id) && l.chapter(id, p).find(is) < 0 {
						l.chapter(id, p).half(is, "a saved file had restored it")
					}
				}
			}
		})
	}
	defer func() {
		for id := range l.chapters {
			if l.last[id] != before[id] {
				l.outage[id], l.filed[id] = true, l.filed[id] || file
				l.takings[id] = append(l.takings[id], nativeTaking{time.Now(), pid, false})
			}
		}
	}()
	l.eachChange(func(id tableid.TableID, p, was, is string) {
		if !l.w.guards(id) {
			return
		}
		c := l.chapter(id, p)
		if c.newest() == is {
			l.heal(id, p, is)
			return
		}
		if l.harmed[id] == nil {
			l.harmed[id] = map[string]time.Duration{}
		}
		if _, known := l.harmed[id][p]; !known {
			l.harmed[id][p] = l.w.awake()
		}
		if name, chain := strings.CutPrefix(p, "chain "); chain && is == "{}" && isUnreached(before[id], name) {
			c.half(is, unreached)
			c.excuse(unreached)
		}
		switch {
		case l.filed[id] && c.find(is) < 0:
			c.half(is, "a saved file had restored it")
		case c.find(is) >= 0:
		case l.blind && l.young(id), (l.blind || l.young(id) || len(l.harmed[id]) > 0) && c.captured < len(c.versions)-1:
			c.half(is, "it was flushed before canaryd knew it")
		}
		switch {
		case l.blind:
			c.excuse("the flush was missed")
		case l.outage[id] && l.w.owner(id).kind == remakes:
			c.excuse("an unknown process made it again in the outage")
		}
	})
}

// young reports whether the table was made so recently that canaryd may not have read it.
func (l *nativeLedger) young(id tableid.TableID) bool {
	made, is := l.made[id]
	return is && l.w.awake()-made < 3*time.Second
}

// known reports whether canaryd has claimed to know the part.
func (c *nativeChapter) known() bool { return c.captured >= 0 && c.versions[c.captured] != absent }

func (c *nativeChapter) excuse(why string) {
	if c.excused == "" {
		c.excused = why
	}
}

// half notes a content that canaryd may learn although its owner never wrote it.
func (c *nativeChapter) half(text, why string) {
	if c.halves == nil {
		c.halves = map[string]string{}
	}
	c.halves[text] = why
}

// goBlind notes that canaryd misses commits from now on: each version that it has not claimed may
// be unknown to it, and each change of a young table.
func (l *nativeLedger) goBlind(is bool) {
	if l.blind = is; !is {
		return
	}
	l.wasBlind = true
	for id, parts := range l.chapters {
		for _, c := range parts {
			if c.captured < len(c.versions)-1 || l.young(id) {
				c.excuse(notHeard)
			}
		}
	}
}

// canaryd checks a transaction of canaryd's.
func (l *nativeLedger) canaryd() {
	before := l.last
	l.eachChange(func(id tableid.TableID, p, was, is string) {
		if !l.w.guards(id) {
			l.violation("%s %s is of a table that canaryd does not guard, and it wrote %s", id.NFT(), p, is)
			return
		}
		c := l.chapter(id, p)
		i, newest := c.find(is), len(c.versions)-1
		if i < 0 && strings.HasPrefix(p, "set ") {
			i = l.without(id, c, is)
		}
		newer := was == c.newest() && before[id] != nil && (c.excused == "" || !l.wasBlind) && (was != "{}" || c.excused == "")
		l.heal(id, p, is)
		switch {
		case i == newest:
		case l.w.refused && l.partly(c, is):
			l.excuses["a rule is refused"]++
		case c.excused == halfWritten:
			l.excuses[halfWritten]++
		case i < 0 && l.filed[id] && strings.HasPrefix(p, "set "): // elements of the file and of the replay
			l.excuses["a saved file had restored it"]++
		case i < 0 && c.halves[is] != "":
			l.excuses[c.halves[is]]++
		case i < 0:
			l.violation("%s %s got %s, which its owner never wrote; it was %s, and the newest is %s", id.NFT(), p, is, was, c.newest())
		case l.filed[id]:
			l.excuses["a saved file had restored it"]++
		case newer:
			l.violation("%s %s: canaryd wrote %s over the newest, %s", id.NFT(), p, is, was)
		case i < c.captured && c.excused == "":
			l.violation("%s %s got version %d, %s; canaryd had claimed to know version %d; the newest is %s", id.NFT(), p, i, is, c.captured, c.newest())
		case c.excused == "":
			l.violation("%s %s got version %d, %s; the newest is version %d, %s, and nothing was missed", id.NFT(), p, i, is, newest, c.newest())
		default:
			l.excuses[c.excused]++
		}
	})
}

// without returns the newest version of a set that has these elements; -1 if there is none. Its
// other elements may only be of services that the owner has removed: a replay leaves these out.
func (l *nativeLedger) without(id tableid.TableID, c *nativeChapter, is string) int {
	elements := func(text string) []string {
		return strings.FieldsFunc(strings.Trim(text, "{}"), func(r rune) bool { return r == ',' || r == ' ' })
	}
	for i, v := range slices.Backward(c.versions) {
		had := elements(v)
		now := slices.DeleteFunc(slices.Clone(had), func(e string) bool {
			newest := l.chapter(id, "chain "+e).newest()
			return newest == absent && !slices.Contains(elements(is), e)
		})
		if v != absent && slices.Equal(now, elements(is)) {
			return i
		}
	}
	return -1
}

// partly reports whether a text is a version without some of its rules.
func (l *nativeLedger) partly(c *nativeChapter, text string) bool {
	return slices.ContainsFunc(c.versions, func(v string) bool {
		for part := range strings.SplitSeq(strings.Trim(text, "{}"), "; ") {
			if part != "" && !strings.Contains(v, part) {
				return false
			}
		}
		return true
	})
}

// capture notes that canaryd claims to know everything.
func (l *nativeLedger) capture() {
	clear(l.outage)
	l.wasBlind = l.blind
	for id, parts := range l.chapters {
		now := partsOf(l.last[id])
		for p, c := range parts {
			is, has := now[p]
			if !has {
				is = absent
			}
			i := c.find(is)
			if c.captured = i; i == len(c.versions)-1 {
				c.excused = ""
			} else {
				c.excuse("it differed at the last rest")
			}
		}
	}
}

// unsaid returns the parts that have been lost for longer than that while canaryd was awake.
func (l *nativeLedger) unsaid(patience time.Duration) (list []string) {
	for id, parts := range l.harmed {
		for p, since := range parts {
			if c := l.chapter(id, p); l.w.awake()-since >= patience && c.excused == "" && !l.filed[id] && c.known() {
				list = append(list, fmt.Sprintf("%s %s", id.NFT(), p))
			}
		}
	}
	slices.Sort(list)
	return list
}

// differences returns the parts that are not as their owner last wrote them.
func (l *nativeLedger) differences() (list []string) {
	for id, parts := range l.chapters {
		now := partsOf(l.last[id])
		for p := range now {
			if parts[p] == nil {
				list = append(list, fmt.Sprintf("%s %s is %s, of no owner", id.NFT(), p, now[p]))
			}
		}
		for p, c := range parts {
			is, has := now[p]
			if !has {
				is = absent
			}
			if is == c.newest() || l.w.owner(id).gone && l.filed[id] {
				continue
			}
			switch {
			case l.filed[id]:
				c.excuse("a saved file had restored it")
			case !c.known():
				c.excuse("it was flushed before canaryd knew it")
			}
			text := fmt.Sprintf("%s %s is %s, its owner's newest is %s", id.NFT(), p, is, c.newest())
			if c.excused != "" {
				text += " (excused: " + c.excused + ")"
			}
			list = append(list, text)
		}
	}
	slices.Sort(list)
	return list
}

// judgeRecords checks the flush records: each is of a real loss, names only processes that took
// something, and is over.
func (l *nativeLedger) judgeRecords(list []api.Flush) {
	for _, f := range list {
		waits := f.Outcome == api.AwaitingDecision
		if f.Open() && !waits {
			l.violation("the record %s of %s is open at rest: %s", f.ID, strings.Join(f.NativeNames(), ", "), f.Outcome)
		}
		for _, loss := range f.Native {
			var id tableid.TableID
			for i := range l.chapters {
				if i.NFT() == loss.Table {
					id = i
				}
			}
			begin, end := f.Time, f.Time.Add(time.Duration((f.NoticedSeconds+f.AbsentSeconds)*float64(time.Second)))
			if !f.LastInForce.IsZero() {
				begin = f.LastInForce
			}
			if l.w.missedAny { // then canaryd may see the loss later
				begin = time.Time{}
			}
			if waits || f.Open() {
				end = time.Now()
			}
			real := false
			pids := map[uint32]bool{}
			for _, t := range l.takings[id] {
				pids[t.pid] = true
				within := !t.at.Before(begin.Add(-2*time.Second)) && !t.at.After(end.Add(2*time.Second))
				real = real || within && (!t.byOwner || loss.Kind == "deleted_by_owner_or_unknown" || f.CulpritsMissed || l.w.missedAny)
			}
			if !real {
				l.violation("the record %s says that %s was %s (%s) at %s, and no process took a part of it then", f.ID, loss.Table, loss.Kind, loss.Why, f.Time.Format("04:05.000"))
			}
			for _, pid := range loss.By {
				if !pids[pid] {
					l.violation("the record %s blames process %d for %s, which took nothing there", f.ID, pid, loss.Table)
				}
			}
		}
	}
}
