package culprit

import (
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// This file decides which processes belong to a purge. In doubt a deletion counts as the
// owner's decision, because a stale rule does more harm than a successful purge.

// A deed is a write of a process to a chain, or its use of the xtables lock.
type deed struct {
	by   watch.Doer
	from time.Time // on legacy it may have written since then; else at
	at   time.Time
}

// Touches are the deeds of other processes to one table, each in order.
type touches struct {
	any  []deed // to any chain, as far as is known
	some map[string][]deed
}

// of returns the deeds to one chain.
func (t touches) of(chain string) []deed { return slices.Concat(t.any, t.some[chain]) }

// over reports whether the processes of all deeds are known by now, or never will be.
func (t touches) over(now time.Time) bool {
	return !slices.ContainsFunc(t.any, func(x deed) bool { return !settledBy(x.at, now) })
}

// others reports whether a known process outside the purge wrote to the table.
func (t touches) others(p *Purge) bool {
	return slices.ContainsFunc(t.any, func(x deed) bool { return x.by.Known() && !p.is(x.by) })
}

// A Span is the time between two reads of a family.
type Span struct{ After, Upto Read }

// over reports whether the processes of the span's deeds are known by now, or never will be.
func (s Span) over() bool { return settledBy(s.Upto.At, time.Now()) }

// settledBy reports whether the processes of deeds at that time are known, or never will be.
func settledBy(at, now time.Time) bool { return now.Sub(at) > purgeGap+purgeGap/10 }

// touched returns the deeds to a table in a span, by chain; none if some of its writers are not
// known. The purges judge by it which process removed a rule.
func (q Inquiry) touched(id rules.TableID, s Span) touches {
	if q.Legacy {
		return touches{any: slices.DeleteFunc(q.lockDeeds(s.After.At), func(x deed) bool { return x.from.After(s.Upto.At) })}
	}
	t, after, upto := touches{some: map[string][]deed{}}, uint32(s.After.Digest), uint32(s.Upto.Digest)
	if !q.Takings.Reach(after) {
		return t
	}
	for _, k := range q.Takings.List {
		if !nft.Newer(k.Commit.Genid, after) || nft.Newer(k.Commit.Genid, upto) || k.Family.Table(k.Table) != id || !q.foreign(k) {
			continue
		}
		w := q.Writers.Of(k.Commit)
		one := deed{w.Doer(), w.Time, w.Time}
		if k.Deleted || k.More || k.WroteMore {
			t.any = append(t.any, one)
			continue
		}
		for _, chain := range slices.Concat(k.Chains, k.Wrote) {
			t.some[chain] = append(t.some[chain], one)
		}
	}
	return t
}

// foreign reports whether another process made the commit.
func (q Inquiry) foreign(k iptables.Taking) bool { return !k.Commit.Own && !q.Own(k.Commit.PID) }

// lockDeeds returns the processes that held the lock since then and may have written; none if
// there were more than canaryd remembers. A process writes between the two messages about
// opening and closing the lock.
func (q Inquiry) lockDeeds(since time.Time) (list []deed) {
	all := q.Writers.Holders(since.Add(-purgeGap))
	first := slices.IndexFunc(all, func(w watch.Writer) bool { return !w.Time.Before(since) })
	if first < 0 || first == 0 && len(all) == watch.WritersKept {
		return nil
	}
	for _, w := range lastOf(all[first:]) {
		if !q.Own(w.PID) && !onlyReads(w.Command) {
			opened := slices.IndexFunc(all, func(o watch.Writer) bool { return o.PID == w.PID })
			list = append(list, deed{w.Doer(), all[opened].Time, w.Time})
		}
	}
	return list
}

// acts returns the writes of other, known processes to all tables since then. near and
// keepAwake look there for the purge's processes.
func (q Inquiry) acts(since time.Time) (list []deed) {
	if q.Legacy {
		list = q.lockDeeds(since)
	} else {
		for _, w := range q.Writers.Since(since) {
			if !q.Own(w.PID) {
				list = append(list, deed{w.Doer(), w.Time, w.Time})
			}
		}
	}
	return slices.DeleteFunc(list, func(x deed) bool { return !x.by.Known() })
}

// did reports whether the purge made all deeds: the writes to a chain between the reads that
// showed a rule of it and then did not. Its owner did not remove such a rule. It is false
// without deeds. With q it judges writers that ended before canaryd could read them by their
// neighbours.
func (p *Purge) did(q Inquiry, deeds []deed) bool {
	for _, x := range deeds {
		if !p.is(x.by) && !p.near(q, x) {
			return false
		}
	}
	return len(deeds) > 0
}

// is reports whether a process is known to belong to the purge.
func (p *Purge) is(by watch.Doer) bool { return slices.ContainsFunc(p.by, by.Is) }

// near reports whether a command counts for the purge although it ended before canaryd could
// read its process. All known processes that wrote less than purgeGap before or after it belong
// to the purge. Or the last known writer before it and the first after it do, because a busy
// machine executes few commands in a second.
func (p *Purge) near(q Inquiry, x deed) bool {
	if x.by.Known() || !onlyOneRule(x.by.Comm) || x.at.IsZero() || time.Since(x.at) <= purgeGap {
		return false
	}
	nearby, before, after, behind := false, false, false, false
	for _, o := range q.acts(x.at.Add(-purgeQuiet)) {
		is := p.is(o.by)
		if o.at.Sub(x.at).Abs() <= purgeGap {
			if !is {
				return false
			}
			nearby = true
		}
		if !o.at.After(x.at) {
			before = is
		} else if !behind {
			after, behind = is, true
		}
	}
	return nearby || before && after
}

// onlyOneRule reports whether a program may be an iptables that changes one rule at a time. On
// legacy the name of an ended process is unknown.
func onlyOneRule(comm string) bool {
	return comm == "" || strings.HasPrefix(strings.Replace(comm, "ip6tables", "iptables", 1), "iptables") && !strings.Contains(comm, "-r")
}

// keepAwake notes the last write of the purge's processes, to any table. A purge that has
// written nothing for a while counts as over.
func (p *Purge) keepAwake(q Inquiry) {
	for _, x := range q.acts(p.last) {
		if p.is(x.by) {
			p.last = pace.Latest(p.last, x.at)
		}
	}
}

// purgers returns the commands of an agent or script that deleted a mark by name. Two facts
// have to agree. The command line names the mark. And another mark of its table, or another
// rule of its chain, is still there, although a flush would have removed both. On legacy the
// probe may have been too late to show the second fact; then a second command of the same
// process is needed. On nft a second command is also needed if a command ended before its line
// could be read: there the kernel names the rule.
func (q Inquiry) purgers(b Bounds, byName bool, marks canary.Marks) (list []watch.Writer) {
	if q.Legacy {
		for _, w := range lastOf(q.Writers.Holders(b.First.Add(-holderWindow))) {
			if !q.Own(w.PID) && w.Doer().OneJob() && q.namesMark(w.Command, canary.IsMarkComment) {
				list = append(list, w)
			}
		}
		return slices.DeleteFunc(slices.Clone(list), func(w watch.Writer) bool {
			another := slices.ContainsFunc(list, func(o watch.Writer) bool { return o.Command != w.Command && o.Doer().Is(w.Doer()) })
			return !byName && !another
		})
	}
	gone, unread := map[rules.TableID]int{}, []watch.Writer(nil)
	for _, k := range q.Takings.List {
		if !q.foreign(k) {
			continue
		}
		id, w, now := k.Family.Table(k.Table), q.Writers.Of(k.Commit), nft.Newer(k.Commit.Genid, b.Intact)
		mark := ""
		for _, r := range k.Rules {
			if r.Comment != "" {
				mark = r.Comment
				if now {
					gone[id]++
				}
			}
		}
		last := now && gone[id] > len(marks[id].Witnessed)
		if mark == "" || k.Deleted || k.Count != 1 || last || !w.Doer().OneJob() {
			continue
		}
		switch {
		case w.Command == "" && onlyOneRule(w.Comm) && time.Since(w.Time) <= PurgeKept:
			unread = append(unread, w)
			if another := slices.ContainsFunc(unread, func(o watch.Writer) bool { return o.PID != w.PID && o.Doer().Is(w.Doer()) }); !now || !another {
				continue
			}
		case !now || !q.namesMark(w.Command, func(word string) bool { return word == mark }):
			continue
		}
		list = append(list, w)
	}
	return list
}

// namesMark reports whether an iptables command line deletes a mark by name: a rule with its
// comment, or the canary's chain. comment reports whether a word is a mark's comment.
func (q Inquiry) namesMark(command string, comment func(word string) bool) bool {
	option, chain, named := "", "", false
	words := strings.Fields(command)
	for i, w := range words {
		switch w {
		case "-D", "--delete", "-F", "--flush", "-X", "--delete-chain":
			option = strings.TrimLeft(w, "-")[:1]
			if i+1 < len(words) {
				chain = words[i+1]
			}
		}
		named = named || comment(strings.Trim(w, `"'`))
	}
	return strings.EqualFold(option, "d") && named || option != "" && chain == q.Canary
}

// DeletedByName reports whether a probe shows that marks are gone without a flush. On legacy
// purgers needs that, or a second command. A flush of the table removes a canary with its
// witnesses. A flush of a built-in chain removes more than the witness.
func DeletedByName(chain string, marks canary.Marks, f rules.Family, probed iptables.Probed) bool {
	for id, m := range marks {
		if id.Family != f || m.Nonce == "" {
			continue
		}
		canaryStands := marks.CanaryPresent(f, id.Name, chain, probed)
		for _, w := range m.Witnessed {
			held := probed.Holdings[iptables.Place{Table: id.Name, Chain: w}]
			stands := slices.Contains(held.Comments, m.Nonce.WitnessComment())
			if stands != canaryStands || !stands && held.Rules > 0 {
				return true
			}
		}
	}
	return false
}

// named returns the writer as a record names it. For a purge that is the process that decided
// on it, and not each program that it executed.
func (q Inquiry) named(w watch.Writer) watch.Writer {
	if by := w.Doer(); q.Purge != nil && q.Purge.is(by) {
		return w.OfDoer(by)
	}
	return w
}

// A Read is a full read of one family, and the time when it began.
type Read struct {
	Digest uint64
	At     time.Time
}
