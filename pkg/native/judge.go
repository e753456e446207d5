package native

import (
	"slices"
	"sync"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
)

// A Verdict is the state of one table.
type Verdict string

// The verdicts.
const (
	Intact       Verdict = "intact"
	TableDeleted Verdict = "table_deleted" // by a process that is not its owner
	Emptied      Verdict = "emptied"       // it exists, but has lost rules or elements
	Replaced     Verdict = "replaced"      // a flusher made it again from a file
	Changed      Verdict = "changed"       // by its owner
	Disabled     Verdict = "disabled"      // the kernel attaches none of its chains
	// Unattributed: only this table was deleted, by its owner or another process. It is reported,
	// but not replayed.
	Unattributed Verdict = "deleted_by_owner_or_unknown"
)

// A Remedy is the way in which a table is put back.
type Remedy uint8

// The remedies.
const (
	NoRemedy    Remedy = iota
	ByCreate           // Table.Create
	ByReplace          // Table.Replace
	ByRefill           // Table.Refill
	ByMerge            // Table.Merge
	ByAdmission        // see Admission
)

// Evidence is all that is known about one table.
type Evidence struct {
	Was *Table // the content that ought to be in force
	Now *Table // the content that a read found; nil: there is no such table
	// Deeds are the effects of commits on the table since Was was read, the oldest first.
	Deeds []*Deed
	// Missed: notifications of some commits are missing, so Deeds is incomplete.
	Missed bool
	// WitnessLost: the witness that existed when Was was read is gone. It counts if commits were
	// missed; else each deed has it.
	WitnessLost bool
	Habits      owners.Habits
	// Replayed: canaryd wrote the table since Was was read, and Deeds are those since the write. So
	// the present table may have another handle although no owner made it.
	Replayed bool
	// Unread: the table was too large to be read, so Was has no content. There is no remedy.
	Unread bool
	// Used is that of the Probe which has Now; nil: Now is the whole table.
	Used map[string]bool
}

// A Finding is a verdict and its evidence.
type Finding struct {
	Verdict Verdict
	Remedy  Remedy
	Why     string   // for people
	Changes []Change // changes of content; an intact table has none
}

// Judge returns the finding for a table; canaryd puts the table back if it has a Remedy. The
// owner has the last word. A change that may be its own is no loss, unless the table exists
// without the parts that carry traffic into it.
func Judge(e Evidence) Finding {
	f := Finding{Verdict: Changed, Why: e.by("changed it"), Changes: Diff(e.Was, e.Now)}
	switch {
	case e.Now == nil:
		e.judgeGone(&f)
	case e.Unread && !slices.ContainsFunc(e.Deeds, func(d *Deed) bool { return d.Made != 0 }):
		e.judgeUnread(&f)
	case len(f.Changes) == 0:
		f.Verdict, f.Why = Intact, "its content is the same"
	case e.Now.Dormant() && !e.Was.Dormant():
		f.Verdict, f.Why = Disabled, "the flag dormant is set"
	case e.Now.Handle != e.Was.Handle && !e.byReplay():
		e.judgeMade(&f)
	default:
		e.judgeParts(&f)
	}
	if e.Unread && f.Verdict != Changed {
		f.Remedy, f.Why = NoRemedy, f.Why+"; it was too large (--max-rules), so canaryd cannot put it back"
	}
	return f
}

// byReplay reports whether canaryd made the present table, and no other process since.
func (e *Evidence) byReplay() bool {
	return e.Replayed && !e.Missed && !slices.ContainsFunc(e.Deeds, func(d *Deed) bool { return d.Deleted || d.Made != 0 })
}

// by says in words who made the last commit.
func (e *Evidence) by(did string) string {
	who := "a process that may be its owner"
	if n := len(e.Deeds); n > 0 {
		switch e.Deeds[n-1].By {
		case Owner:
			who = "its owner"
		case LikelyOwner:
			who = "likely its owner"
		case NotOwner:
			who = "a process that is not its owner"
		}
	}
	return who + " " + did
}

// judgeGone judges a table that does not exist, and writes the result to f. It is a loss if
// tables of more than one owner were deleted, or the committer is known not to be its owner.
func (e *Evidence) judgeGone(f *Finding) {
	f.Verdict, f.Why = Unattributed, "it was deleted alone: the witness is in place"
	witness, with, by := e.WitnessLost && e.Missed, "", UnknownCommitter
	for _, d := range e.Deeds {
		if d.Deleted {
			witness, with, by = d.WitnessLost, d.With, d.By
		}
	}
	switch {
	case !witness && e.Was.Empty() && !e.Unread:
		f.Verdict, f.Why = Changed, "it was deleted, and held no rule and no element"
	case !witness && with != "":
		f.Verdict, f.Remedy, f.Why = TableDeleted, ByCreate, "one commit deleted it and table "+with+" of another owner"
	case witness:
		f.Verdict, f.Remedy, f.Why = TableDeleted, ByCreate, "the ruleset was flushed: the witness went with it"
	case by == NotOwner:
		f.Verdict, f.Remedy, f.Why = TableDeleted, ByCreate, "a process deleted it that is not its owner"
	case by == Owner:
		f.Verdict, f.Why = Changed, "its owner deleted it"
	case by == LikelyOwner:
		f.Verdict, f.Why = Changed, "its owner deleted it, likely: a process of its owner had just started"
	}
}

// judgeMade judges a table that was deleted and made again (another handle), and writes the
// result to f. A flusher's table is replaced. If an owner's lacks a base chain after a flush, a
// merge adds the rest: chains, and other elements of the sets that its owner has written. If a
// commit took all rules since, the newest are unknown, and the loss waits for a decision. So does
// a table that canaryd made, if commits since were missed and a base chain is lost.
func (e *Evidence) judgeMade(f *Finding) {
	f.Why = e.by("made it again")
	flushed := e.WitnessLost && e.Missed
	for _, d := range e.Deeds {
		if d.Deleted {
			flushed = d.flush() || d.By == NotOwner
		}
		switch {
		case d.Made == 0:
		case d.By == NotOwner, d.Deleted && d.flush():
			f.Verdict, f.Remedy, f.Why = Replaced, ByReplace, "a flusher made it again, from a file"
		default:
			f.Verdict, f.Remedy, f.Why = Changed, NoRemedy, e.by("made it again")
		}
	}
	switch {
	case f.Verdict != Changed:
	case flushed && e.lacksBase(): // an owner that does not notice the flush writes only its next change
		f.Verdict, f.Remedy, f.Why = Emptied, ByMerge, "after a flush its owner wrote a part of it only"
	case e.Replayed && e.Missed && e.lacksBase(): // it may be the table that canaryd made
		f.Verdict, f.Why = Emptied, "base chains are empty or gone; canaryd did not hear of the commit, which may have been its owner's"
	case e.ruleless() && e.hadSeveral() && e.flushedLast():
		f.Verdict, f.Why = Emptied, "it was made again, and then a commit took all its rules, which canaryd does not know"
	}
}

// flushedLast reports whether the last commit that took rules only took, and its process is not
// known to be the owner. A missed commit may have been of that kind.
func (e *Evidence) flushedLast() bool {
	if d := e.last((*Deed).rules); d != nil {
		return d.pure() && d.By != Owner && d.By != LikelyOwner
	}
	return e.Missed
}

// lacksBase reports whether a base chain that had rules is gone or empty. After a flush that is
// a loss, because no packets reach the rules that the owner has written.
func (e *Evidence) lacksBase() bool {
	stand := e.Now.chainsByName()
	for i := range e.Was.Chains {
		c := &e.Was.Chains[i]
		if now := stand[c.Name]; c.Base && len(c.Rules) > 0 && (now == nil || len(now.Rules) == 0) {
			return true
		}
	}
	return false
}

// A loss says whether a part of a table is lost.
type loss uint8

const (
	noLoss   loss = iota
	lossOf        // it is lost, and is put back
	openLoss      // a missed commit took it, perhaps its owner's: it waits for a decision
)

// lossIf returns lossOf if is, else noLoss.
func lossIf(is bool) loss {
	if is {
		return lossOf
	}
	return noLoss
}

// judgeParts judges a table that exists and has changed, by each change in f, and writes the
// result to f. One lost part is enough for a refill; a doubtful part waits for a decision
// (Finding.Open). It returns the lost parts.
func (e *Evidence) judgeParts(f *Finding) (lost []Change) {
	chains := sync.OnceValue(e.Was.chainsByName)
	named := sync.OnceValue(func() referred { return e.Now.refersTo() }) // it reads each rule
	for _, c := range f.Changes {
		is, why := noLoss, ""
		switch {
		case c.Kind == nft.Chains && (c.Empty || c.Gone) && c.Lost > 0:
			was := chains()[c.Name]
			// An owner empties a chain before deleting it; then nothing leads there any more.
			if was.Base || e.Used[c.Name] || e.Used == nil && named().chains[c.Name] {
				is, why = e.tookChain(was, c.Gone), "a commit took the rules of chain "+c.Name+" and wrote nothing"
			}
		case c.Kind == nft.Sets && c.Empty:
			is, why = e.tookSet(c.Name, func() bool { return named().sets[c.Name] }), "a commit took the elements of "+c.Name+" and did nothing else"
		}
		if c.Kind == nft.Sets && c.Lost > 0 && !c.Empty && !c.Gone && e.replacedSet(c.Name) {
			f.Remedy, is, why = ByMerge, lossOf, "a commit took all elements of "+c.Name+" and wrote others in their place"
		}
		switch {
		case is == lossOf && f.Verdict != Emptied || is == lossOf && f.Remedy == NoRemedy:
			f.Verdict, f.Remedy, f.Why = Emptied, max(f.Remedy, ByRefill), why
		case is == openLoss && f.Verdict != Emptied:
			f.Verdict, f.Why = Emptied, c.String()+"; canaryd did not hear of the commit, which may have been its owner's"
		}
		if is != noLoss {
			lost = append(lost, c)
		}
	}
	return lost
}

// Open reports whether a part of the table is lost that its owner may have taken. It waits for a
// decision.
func (f Finding) Open() bool { return f.Verdict == Emptied && f.Remedy == NoRemedy }

// missed judges a part that no known commit emptied, for tookChain and tookSet. keeps is the
// result for a part that its owner never empties. Without missed commits it is no loss.
func (e *Evidence) missed(habit owners.Habit, keeps loss) loss {
	switch {
	case !e.Missed || e.Habits.Resyncs && habit == owners.Empties:
		return noLoss
	case e.ruleless() && e.hadSeveral():
		return lossOf
	case habit == owners.Keeps:
		return keeps
	}
	return openLoss
}

// hadSeveral reports whether at least two chains had rules. If all of them are empty now, a
// flush is likely; an owner empties one.
func (e *Evidence) hadSeveral() bool {
	had := 0
	for i := range e.Was.Chains {
		if len(e.Was.Chains[i].Rules) > 0 {
			had++
		}
	}
	return had > 1
}

// tookChain judges a chain that lost its last rule, or is gone. The last deed that took from it
// decides by its committer and effect, else by the owner's habit for such chains. judgeParts
// calls it if packets would still reach the chain.
func (e *Evidence) tookChain(was *Chain, gone bool) loss {
	d, habit := e.last(func(d *Deed) int { return d.Rules[was.Name] }), e.Habits.Chain(was.Name, was.Base)
	if deleted := e.last(func(d *Deed) int { return d.Chains[was.Name] }); gone && deleted != nil {
		d = deleted
	}
	switch {
	case d == nil && gone && habit != owners.Keeps: // the chain was deleted by its name
		return lossIf(e.Missed && e.ruleless() && e.hadSeveral())
	case d == nil:
		return e.missed(habit, lossOf)
	}
	if is, certain := e.foreign(d); certain {
		return lossIf(is)
	}
	flushed := e.ruleless() && d.rules() > 1
	switch {
	case !d.pure():
		return noLoss
	case gone: // the chain was deleted by its name, as no flush does
		return lossIf(habit == owners.Keeps)
	case habit == owners.Keeps:
		return lossOf
	case habit == owners.Together:
		return lossIf(flushed || len(d.Rules) == 1 && len(d.Chains) == 0 && !e.unprotected(was))
	case habit == owners.Singly:
		return lossIf(flushed || d.Rules[was.Name] > 1)
	case habit == owners.ByComment:
		return lossIf(flushed || e.leftSiblings(was))
	}
	return lossIf(flushed)
}

// foreign reports whether a commit that emptied a part is not its owner's, and whether the
// committer makes that certain. If it does not, the owner's habits decide.
func (e *Evidence) foreign(d *Deed) (is, certain bool) {
	switch {
	case d.By == NotOwner:
		return true, true
	case d.By == Owner || d.ByName:
		return false, true
	case d.By == Shell && e.Habits.Known:
		return true, true
	}
	return false, false
}

// unprotected reports whether a chain's rules may be the only rules that Docker has for a port.
// Docker may then remove them itself, so tookChain finds no loss.
func (e *Evidence) unprotected(was *Chain) bool {
	but := e.Habits.But(was.Name)
	if e.Unread { // the rules that it had are not known
		return but != ""
	}
	return but != "" && slices.ContainsFunc(e.Was.Chains, func(c Chain) bool {
		return slices.ContainsFunc(c.Rules, func(r Rule) bool { return r.comment() == but })
	})
}

// leftSiblings reports whether the table still has a rule with the comment of a rule of the
// chain. An owner removes all rules of one comment together, so another process took the
// chain's.
func (e *Evidence) leftSiblings(was *Chain) bool {
	return slices.ContainsFunc(was.Rules, func(r Rule) bool {
		of := r.comment()
		return of != "" && slices.ContainsFunc(e.Now.Chains, func(c Chain) bool {
			return slices.ContainsFunc(c.Rules, func(r Rule) bool { return r.comment() == of })
		})
	})
}

// last returns the last deed for which took is not 0, nil if there is none. took returns how
// many parts a deed took.
func (e *Evidence) last(took func(*Deed) int) *Deed {
	for i := len(e.Deeds) - 1; i >= 0; i-- {
		if took(e.Deeds[i]) > 0 {
			return e.Deeds[i]
		}
	}
	return nil
}

// ruleless reports whether the table had rules, and has none now. tookChain and missed take
// that for a flush if more than one rule or chain was lost.
func (e *Evidence) ruleless() bool {
	had := func(c Chain) bool { return len(c.Rules) > 0 }
	return slices.ContainsFunc(e.Was.Chains, had) && !slices.ContainsFunc(e.Now.Chains, had)
}
