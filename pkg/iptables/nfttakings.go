package iptables

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Taking lists the chains and rules that one commit to nf_tables deleted from an iptables
// table. There is a Taking for each table that the commit touched, even without a deletion.
type Taking struct {
	Commit nft.Commit
	Family rules.Family
	Table  rules.TableName
	// Deleted reports that the table itself was deleted with its content.
	Deleted bool
	// Chains were deleted, or have fewer rules than before.
	Chains []string
	// Rules are the deleted rules that canaryd can identify: marks, and the jumps of built-in
	// chains.
	Rules []TakenRule
	// More reports that the commit deleted more chains or rules than are kept here.
	More bool
	// Wrote are chains that got rules. WroteMore reports that more chains did than are kept
	// here.
	Wrote     []string
	WroteMore bool
	// Count is the number of deleted rules.
	Count int
}

// A TakenRule is a deleted rule: a mark, or a jump of a built-in chain.
type TakenRule struct {
	Chain   string
	Target  string // the chain that a jump led to
	Comment string // a mark's
}

// Took reports whether the chain was deleted, or has fewer rules than before.
func (k Taking) Took(chain string) bool {
	return k.Deleted || k.More || slices.Contains(k.Chains, chain)
}

// Touched reports whether the chain lost rules or got some.
func (k Taking) Touched(chain string) bool {
	return k.Took(chain) || k.WroteMore || slices.Contains(k.Wrote, chain)
}

// TookRule reports whether that mark or jump was deleted.
func (k Taking) TookRule(r TakenRule) bool { return slices.Contains(k.Rules, r) }

// Takings lists the deletions by the last commits of other processes, oldest first. If they are
// Known, they cover every commit after Since, up to the last one before the call.
type Takings struct {
	Known bool
	Since uint32
	List  []Taking
}

// Reach reports whether all deletions after that genid are known.
func (t Takings) Reach(genid uint32) bool { return t.Known && !nft.Newer(t.Since, genid) }

// The bounds of takings. They suffice for a flush of 5,000 services, and for the grace after
// which a missing jump counts as lost.
const (
	takingsKept     = 512
	takingsFor      = 2 * time.Minute
	takenKept       = 20_000 // chains of one commit in one table
	takenAltogether = 40_000 // chains of all
	wroteKept       = 1000   // chains of one commit in one table that got rules
)

// Takings returns the deletions by commits of the last minutes, as far as they are known, for
// the search for a culprit. Callers share the list, and do not change it. On legacy it returns
// nothing.
func (k *Kernel) Takings(ctx context.Context) Takings {
	if k.mirror == nil {
		return Takings{}
	}
	return k.mirror.takings(ctx)
}

// A takingsLog gathers takings from notifications.
type takingsLog struct {
	mu    sync.Mutex
	kept  Takings
	heard []time.Time // the time of each entry of kept.List
	size  int         // chains of all

	// For the commit whose end was not heard yet.
	open []*openTaking
	last *openChain // most notifications name the same chain as the one before
}

// An openTaking is an unfinished Taking, without its Commit and Chains.
type openTaking struct {
	Taking
	chains map[string]*openChain
}

// An openChain counts a commit's changes of one chain.
type openChain struct {
	of      *openTaking
	name    string
	builtin bool
	net     int  // added rules minus deleted ones
	wrote   bool // rules were added
	gone    bool // the chain itself was deleted
}

// all returns the known takings, for Kernel.Takings. They never change: the log appends new ones
// behind them.
func (l *takingsLog) all() Takings {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Takings{l.kept.Known, l.kept.Since, slices.Clip(l.kept.List)}
}

// restart forgets everything. The mirror calls it when it begins to receive notifications, also
// after it missed some. The log will only hear commits after since.
func (l *takingsLog) restart(since uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept, l.heard, l.size = Takings{Known: true, Since: since}, nil, 0
	l.open, l.last = nil, nil
}

// note counts one notification in the unfinished commit, for its table and chain. mirror.hear
// calls it for tables of iptables.
func (l *takingsLog) note(e nft.Event, table rules.TableName) {
	switch e.Kind {
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		l.table(e.Family, table).Deleted = e.Kind == unix.NFT_MSG_DELTABLE
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		l.chain(e, table).gone = e.Kind == unix.NFT_MSG_DELCHAIN
	case unix.NFT_MSG_NEWRULE:
		c := l.chain(e, table)
		c.net, c.wrote = c.net+1, true
	case unix.NFT_MSG_DELRULE:
		c := l.chain(e, table)
		c.net--
		c.of.Count++
		c.lose(e.Data)
	}
}

// table returns the counts of a table in the unfinished commit, for note and chain. They begin
// at zero.
func (l *takingsLog) table(f rules.Family, table rules.TableName) *openTaking {
	for _, t := range l.open {
		if t.Family == f && t.Table == table {
			return t
		}
	}
	t := &openTaking{Taking: Taking{Family: f, Table: table}, chains: map[string]*openChain{}}
	l.open = append(l.open, t)
	return t
}

// chain returns the counts of the chain that a notification names, in the unfinished commit;
// note calls it. They begin at zero.
func (l *takingsLog) chain(e nft.Event, table rules.TableName) *openChain {
	if c := l.last; c != nil && c.of.Family == e.Family && c.of.Table == table && c.name == string(e.Chain) {
		return c
	}
	t := l.table(e.Family, table)
	c := t.chains[string(e.Chain)]
	if c == nil {
		c = &openChain{of: t, name: string(e.Chain), builtin: rules.Builtin(table, string(e.Chain))}
		t.chains[c.name] = c
	}
	l.last = c
	return c
}

// takenRulesKept bounds the rules of one commit in one table.
const takenRulesKept = 256

// lose notes a deleted rule if it is a mark or a jump of a built-in chain; note calls it. These
// deletions identify a flusher. data is its notification, which may be overwritten later.
func (c *openChain) lose(data []byte) {
	if !c.builtin && !bytes.Contains(data, []byte(markPrefix)) {
		return
	}
	m, err := nft.ParseRule(data)
	if err != nil {
		return
	}
	r := TakenRule{Chain: c.name, Target: jumpOf(m.Rule)}
	r.Comment, _ = markOf(m.Rule)
	if r.Target == "" && r.Comment == "" || r.Comment == "" && !c.builtin {
		return
	}
	if len(c.of.Rules) >= takenRulesKept {
		c.of.More = true
		return
	}
	c.of.Rules = append(c.of.Rules, r)
}

// mayFlush returns the tables of a family in which the unfinished commit may be a part of a
// flush: Taking keeps their last state. Such a commit deletes a mark, a jump of a built-in
// chain, the table, or all rules of a remaining chain. The value is true if it may have deleted
// marks. had returns the number of rules that a chain had before.
func (l *takingsLog) mayFlush(f rules.Family, had func(Place) int) (marks map[rules.TableName]bool) {
	marks = map[rules.TableName]bool{}
	for _, t := range l.open {
		if t.Family != f {
			continue
		}
		took := t.Deleted || t.More || slices.ContainsFunc(t.Rules, func(r TakenRule) bool { return r.Comment != "" })
		may := took || len(t.Rules) > 0
		for name, c := range t.chains {
			if may {
				break
			}
			n := had(Place{Table: t.Table, Chain: name})
			may = !c.gone && c.net < 0 && n > 0 && n+c.net <= 0
		}
		if may {
			marks[t.Table] = took
		}
	}
	return marks
}

// end makes Takings of the counts of a commit by process by; now is when its end was heard.
// mirror.hear calls it. canaryd's own commits leave none, because Takings are evidence
// against other processes.
func (l *takingsLog) end(by nft.Commit, now time.Time) {
	open := l.open
	l.open, l.last = nil, nil
	if len(open) == 0 || by.Own {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range open {
		k := t.taking(by)
		l.kept.List, l.heard = append(l.kept.List, k), append(l.heard, now)
		l.size += k.names()
	}
	l.trim(now)
}

// trim forgets the oldest takings beyond the bounds; end calls it with l.mu held. It keeps or
// forgets the takings of one commit together, so that kept.Since is exact.
func (l *takingsLog) trim(now time.Time) {
	list, n, size := l.kept.List, 0, l.size
	for n < len(list) && (len(list)-n > takingsKept || l.size > takenAltogether || now.Sub(l.heard[n]) > takingsFor) {
		genid := list[n].Commit.Genid
		for ; n < len(list) && list[n].Commit.Genid == genid; n++ {
			l.size -= list[n].names()
		}
		l.kept.Since = genid
	}
	l.kept.List, l.heard = list[n:], l.heard[n:]
	if size-l.size > takingsKept { // many names: free them now, not when the list grows
		l.kept.List = slices.Clone(l.kept.List)
	}
}

// names returns the number of chain names in the Taking.
func (k Taking) names() int { return len(k.Chains) + len(k.Wrote) }

// taking returns the finished Taking of the commit by; end calls it. A table that was deleted
// needs no chains.
func (t *openTaking) taking(by nft.Commit) Taking {
	k := t.Taking
	if k.Commit = by; k.Deleted {
		return k
	}
	for name, c := range t.chains {
		switch {
		case !c.wrote:
		case len(k.Wrote) == wroteKept:
			k.WroteMore = true
		default:
			k.Wrote = append(k.Wrote, name)
		}
		switch {
		case !c.gone && c.net >= 0:
		case len(k.Chains) == takenKept:
			k.More = true
		default:
			k.Chains = append(k.Chains, name)
		}
	}
	return k
}

// jumpOf returns the chain that the rule's verdict leads to, "" without one. lose keeps it,
// because the search for a culprit compares it with a missing jump.
func jumpOf(r nft.Rule) string {
	target := ""
	err := r.Each(func(e nft.Expression) error {
		if e.Name == "immediate" {
			target = string(e.Jump())
		}
		return nil
	})
	if err != nil {
		return ""
	}
	return target
}
