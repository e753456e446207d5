package nft

import (
	"errors"
	"iter"
)

// ErrUnplaced says that a notification does not fit the rules in the order, so
// its object has to be read.
var ErrUnplaced = errors.New("a notification that fits nothing")

// A RuleOrder has the rules of a chain while the notifications of one commit
// change them. R is the caller's data about a rule. NewRuleOrder makes a
// RuleOrder, which is for one goroutine.
//
// A notification names the rule before a new rule. It refers to the kernel's list
// at that moment (nf_tables_commit, nf_tables_rule_notify; Linux 6.18). That list
// has all new rules, even those in later notifications, but no rule whose
// deletion was already notified. For the first and the last rule the notification
// names none.
type RuleOrder[R any] struct {
	nodes   map[uint64]*orderNode[R]
	waiting map[uint64]waitingRule[R] // by the handle of the missing rule before them
	first   orderNode[R]              // sentinel before all rules
	last    *orderNode[R]
	// headless: the first rule was deleted, others stayed, and no rule was added
	// since.
	headless bool
}

type orderNode[R any] struct {
	handle       uint64
	rule         R
	before, next *orderNode[R]
}

type waitingRule[R any] struct {
	handle uint64
	rule   R
}

// NewRuleOrder returns a RuleOrder of the rules of a chain, by their handles, in order; size
// is their number. The mirror and pkg/native apply commits to it.
func NewRuleOrder[R any](size int, rules iter.Seq2[uint64, R]) *RuleOrder[R] {
	o := &RuleOrder[R]{nodes: make(map[uint64]*orderNode[R], size)}
	o.last = &o.first
	room := make([]orderNode[R], 0, size)
	for handle, rule := range rules {
		if len(room) == cap(room) {
			room = make([]orderNode[R], 0, 1)
		}
		room = room[:len(room)+1]
		n := &room[len(room)-1]
		n.handle, n.rule = handle, rule
		o.put(o.last, n)
	}
	return o
}

// put inserts node n behind before, a node of the list.
func (o *RuleOrder[R]) put(before, n *orderNode[R]) {
	n.before, n.next = before, before.next
	if n.next != nil {
		n.next.before = n
	} else {
		o.last = n
	}
	before.next, o.headless = n, false
	o.nodes[n.handle] = n
}

// Add inserts a new rule. before is the handle of the rule before it, 0 if the notification
// has none; appended is its Notification.Append. A rule whose neighbour is missing waits for
// it (Whole). The error is ErrUnplaced: the chain has to be read.
func (o *RuleOrder[R]) Add(handle, before uint64, appended bool, rule R) error {
	if before == 0 && appended {
		if o.headless { // a rule that replaced the first one looks the same
			return ErrUnplaced
		}
		before = o.last.handle
	}
	if o.nodes[handle] != nil || handle == 0 {
		return ErrUnplaced
	}
	at := &o.first
	if before != 0 {
		at = o.nodes[before]
	}
	if at == nil {
		if _, taken := o.waiting[before]; taken || before == handle {
			return ErrUnplaced
		}
		if o.waiting == nil {
			o.waiting = map[uint64]waitingRule[R]{}
		}
		o.waiting[before] = waitingRule[R]{handle, rule}
		return nil
	}
	for {
		n := &orderNode[R]{handle: handle, rule: rule}
		o.put(at, n)
		next, there := o.waiting[handle]
		if !there {
			return nil
		}
		delete(o.waiting, handle)
		if o.nodes[next.handle] != nil {
			return ErrUnplaced
		}
		at, handle, rule = n, next.handle, next.rule
	}
}

// Remove deletes a rule and returns it. The error is ErrUnplaced: there is no such rule, and
// the chain has to be read.
func (o *RuleOrder[R]) Remove(handle uint64) (R, error) {
	n := o.nodes[handle]
	if n == nil {
		var none R
		return none, ErrUnplaced
	}
	n.before.next = n.next
	if n.next != nil {
		n.next.before = n.before
	} else {
		o.last = n.before
	}
	o.headless = o.first.next != nil && (o.headless || n.before == &o.first)
	delete(o.nodes, handle)
	return n.rule, nil
}

// Replace puts a rule into the place of another one, whose handle it gets. The error is
// ErrUnplaced: there is no such rule, and the chain has to be read.
func (o *RuleOrder[R]) Replace(handle uint64, rule R) error {
	n := o.nodes[handle]
	if n == nil {
		return ErrUnplaced
	}
	n.rule = rule
	return nil
}

// Whole reports whether each new rule has its place. It is called at the end of a
// commit.
func (o *RuleOrder[R]) Whole() bool { return len(o.waiting) == 0 }

// Len returns the number of rules that have a place.
func (o *RuleOrder[R]) Len() int { return len(o.nodes) }

// All returns the rules by their handles, in the chain's order. The mirror and pkg/native take
// the chain from it at the end of a commit. Rules that wait for another one (Add) are missing:
// check Whole before.
func (o *RuleOrder[R]) All() iter.Seq2[uint64, R] {
	return func(yield func(uint64, R) bool) {
		for n := o.first.next; n != nil; n = n.next {
			if !yield(n.handle, n.rule) {
				return
			}
		}
	}
}
