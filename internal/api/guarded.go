package api

import (
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/canary"
)

// NativeCounts counts the expected content of the guarded native tables.
func (s Status) NativeCounts() (all Counts) {
	for _, t := range s.Native {
		all.Rules, all.Chains, all.Elements = all.Rules+t.Rules, all.Chains+t.Chains, all.Elements+t.Elements
	}
	return all
}

// NativeFirst reports whether native tables hold more of the guarded rules than iptables' tables.
// Status, check and page show them first then.
func (s Status) NativeFirst() bool { return s.NativeCounts().Rules > s.Generation.Rules }

// OnlyNative reports whether native tables hold all guarded rules, and all of iptables' tables
// are in force. status and check then show one line for iptables (IptablesText) in place of its
// tables.
func (s Status) OnlyNative() bool {
	if !s.NativeFirst() || s.Generation.Rules+s.Generation.Chains > 0 || len(s.Families) == 0 {
		return false
	}
	for _, v := range Tables(s.Families) {
		if v != canary.Intact && v != canary.Changed {
			return false
		}
	}
	return true
}

// IptablesText describes the state of iptables' tables on a node with OnlyNative.
func (s Status) IptablesText() string {
	tables := 0
	for range Tables(s.Families) {
		tables++
	}
	return fmt.Sprintf("iptables' %d tables are intact and hold no protected rule", tables)
}

// GuardedText counts the guarded content, native tables last. An example is "62 rules in 16
// chains, and 189 rules, 141 chains and 221 elements of native tables". number formats a count.
func (s Status) GuardedText(number func(int) string) string {
	text, native := counted(s.Generation.Rules, "rule", number)+" in "+counted(s.Generation.Chains, "chain", number), s.NativeText(number)
	switch {
	case native == "":
		return text
	case s.Generation.Rules+s.Generation.Chains == 0:
		return native + " of native tables"
	}
	return text + ", and " + native + " of native tables"
}

// NativeText counts the expected content of the guarded native tables, in the words of GuardedText.
func (s Status) NativeText(number func(int) string) string {
	native := s.NativeCounts()
	words := Lost{Rules: native.Rules, Chains: native.Chains, Elements: native.Elements}.words(number)
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// Text counts the losses: "62 rules, 16 chains, 3 jumps". It leaves out counts of zero. number
// formats a count. Without a read of the tables it is "unknown".
func (l Lost) Text(number func(int) string) string {
	if l.Unread {
		return "unknown"
	}
	if words := l.words(number); len(words) > 0 {
		return strings.Join(words, ", ")
	}
	return "no rule"
}

// words returns each count that is not zero, in words.
func (l Lost) words(number func(int) string) (words []string) {
	for _, c := range []struct {
		n    int
		what string
	}{{l.Rules, "rule"}, {l.Chains, "chain"}, {l.Elements, "element"}, {l.Jumps, "jump"}} {
		if c.n != 0 {
			words = append(words, counted(c.n, c.what, number))
		}
	}
	return words
}

// counted returns "1 rule" and "2 rules"; number formats the count.
func counted(n int, what string, number func(int) string) string {
	if n != 1 {
		what += "s"
	}
	return number(n) + " " + what
}

// TablesHit returns the iptables tables that lost a rule or a chain, for texts about a record.
// If the flush hit native tables, it leaves out iptables tables that lost only canaryd's marks.
func (f Flush) TablesHit() []TableLoss {
	if len(f.Native) == 0 {
		return f.Lost.Tables
	}
	return slices.DeleteFunc(slices.Clone(f.Lost.Tables), func(t TableLoss) bool {
		return t.Rules+t.Chains+t.Jumps+t.Unprotected == 0 && !t.UnprotectedUnknown && t.Kind != canary.Drifted
	})
}

// Where names the families and tables that a flush hit, native tables by their names. Lists of
// flushes show them. A flush of native tables that took only marks of iptables' tables names
// none of these.
func (f Flush) Where() (families, tables, native []string) {
	families, tables, native = Words(f.Families), Words(f.Tables), f.NativeNames()
	if len(native) > 0 && len(f.Lost.Tables) > 0 && len(f.TablesHit()) == 0 {
		return nil, nil, native
	}
	return families, tables, native
}
