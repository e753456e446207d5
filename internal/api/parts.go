package api

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Baseline is the confirmed generation in a Status, with counts of its differences from the
// present one. It has no rule and no name of a chain.
type Baseline struct {
	BaselineName
	Rules  int `json:"rules"` // of the confirmed generation, jumps included
	Chains int `json:"chains"`
	// NativeTables counts the native tables that it has.
	NativeTables int `json:"nativeTables,omitempty"`
	// AppearedRules counts the rules that the baseline lacks, jumps included, and AppearedChains
	// the chains that have them. Both leave out AppearedTables.
	AppearedRules  int `json:"appearedRules"`
	AppearedChains int `json:"appearedChains"`
	// AppearedParts counts the base chains, sets, objects and flowtables whose declarations the
	// baseline lacks, and AppearedTables the native tables that it lacks as a whole.
	AppearedParts  int `json:"appearedParts,omitempty"`
	AppearedTables int `json:"appearedTables,omitempty"`
	// GoneRules counts the rules that only the baseline has; GoneParts and GoneTables do the same
	// for parts and tables.
	GoneRules  int `json:"goneRules"`
	GoneParts  int `json:"goneParts,omitempty"`
	GoneTables int `json:"goneTables,omitempty"`
	// ReorderedChains counts the chains that have rules of the baseline in another order.
	ReorderedChains int `json:"reorderedChains"`
}

// A BaselineName identifies the confirmed generation, or explains why it is unknown.
type BaselineName struct {
	Generation string    `json:"generation,omitempty"`
	Confirmed  time.Time `json:"confirmed,omitzero"`
	// Error is why the file of the baseline cannot be used. Reading means that canaryd is still
	// reading it. Nothing else is known in either case.
	Error   string `json:"error,omitempty"`
	Reading bool   `json:"reading,omitempty"`
}

// Appeared reports whether anything appeared that the baseline lacks.
func (b *Baseline) Appeared() bool { return b.AppearedRules+b.AppearedParts+b.AppearedTables > 0 }

// Differs reports whether the guarded content differs from the baseline.
func (b *Baseline) Differs() bool {
	return b.Appeared() || b.GoneRules+b.GoneParts+b.GoneTables+b.ReorderedChains > 0
}

// withoutReason returns the copy that may leave through TCP (Status.Public), without a quote of
// the file. A nil baseline, or one without an error, is returned as it is.
func (b *Baseline) withoutReason() *Baseline {
	if b == nil || b.Error == "" {
		return b
	}
	hidden := *b
	hidden.Error = "its file is unusable"
	return &hidden
}

// A Decision is a loss in a Status that waits for an operator. Rules of an earlier run are
// gone, and canaryd may not replay them unasked. It ends when their owner writes them, when
// Restore puts them back, or when Dismiss accepts the loss.
type Decision struct {
	Flush      string    `json:"flush"` // ID of its flush record
	Since      time.Time `json:"since"` // when it was found
	Generation string    `json:"generation"`
	Reason     string    `json:"reason"` // why the rules are not replayed unasked
	// Tables are the tables that still lack rules, with their verdicts.
	Tables  map[rules.Family]Verdicts `json:"tables"`
	Restore string                    `json:"restore"` // the command that puts the rules back
	Dismiss string                    `json:"dismiss"` // the command that accepts the loss
}

// Problem names the lost tables and the two commands in one line.
func (w Decision) Problem() error {
	return fmt.Errorf("rules were lost while canaryd did not run (%s): `%s` puts them back, `%s` accepts the loss",
		TablesText(w.Tables), w.Restore, w.Dismiss)
}

// A FamilyKeeper is the keeper's state for one family, in a Status.
type FamilyKeeper struct {
	State KeeperState `json:"state"`
	// Reason is why the keeper is unavailable.
	Reason string `json:"reason,omitempty"`
}

// KeeperText says the keeper's state of each family in one line; "" if that is not known.
func (s Status) KeeperText() string {
	var words []string
	for f, k := range InOrder(s.Keeper) {
		word := fmt.Sprintf("%s %s", f, k.State)
		if k.Reason != "" {
			word += " (" + k.Reason + ")"
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

// Nothing means, in a Status, that every table was read and has no rule to guard; it lists the
// other rules. A new node is like this for a moment. A node whose rules have other names, or
// are in native nftables tables, stays like this.
type Nothing struct {
	// NativeTables are nftables tables that are not iptables', such as "ip kube-proxy"; the first
	// twenty.
	NativeTables []string `json:"nativeTables,omitempty"`
	// Rules counts the rules in iptables' tables that --protect does not name. Chains are some of
	// the chains that have them.
	Rules  int      `json:"rules,omitempty"`
	Chains []string `json:"chains,omitempty"`
	// Kubelet means that kubelet's own rules are there, and are guarded.
	Kubelet bool `json:"kubelet,omitempty"`
	// Unknown means that canaryd could not list the other rules.
	Unknown bool `json:"unknown,omitempty"`
}

// String says in one line that nothing is protected, and lists the rules found instead. Health
// and the page show it in place of "healthy", because a wrong --protect looks like that.
func (n Nothing) String() string {
	line := "nothing is protected: no rule that --protect names or a file declares is in iptables' tables"
	if n.Kubelet {
		line = "nothing is protected but kubelet's own rules"
	}
	var found []string
	if len(n.NativeTables) > 0 {
		found = append(found, "native nftables tables, which canaryd does not guard ("+strings.Join(n.NativeTables, ", ")+")")
	}
	if n.Rules > 0 {
		text := fmt.Sprintf("%d iptables rules that --protect does not name", n.Rules)
		if len(n.Chains) > 0 {
			text += " (such as those of " + strings.Join(n.Chains, ", ") + ")"
		}
		found = append(found, text)
	}
	switch {
	case len(found) > 0 && n.Unknown:
		return line + "; found instead: " + strings.Join(found, ", and ") + "; the rest could not be listed"
	case len(found) > 0:
		return line + "; found instead: " + strings.Join(found, ", and ")
	case n.Unknown:
		return line + "; other rules could not be listed"
	default:
		return line + ", and no others were found"
	}
}

// Begun reports whether the marks were planted, or taken over from an earlier run, and every
// table was looked at. systemd is then notified that canaryd is ready.
func (s Status) Begun() bool {
	if s.Stopped {
		return true // after a cleanup there is nothing to wait for
	}
	if s.Generation.Captured.IsZero() || len(s.Families) == 0 {
		return false
	}
	for _, v := range Tables(s.Families) {
		if v == canary.Unknown || v == "" {
			return false
		}
	}
	return true
}

// OwnerlessRules means that kube-proxy's rules are in force and that kube-proxy does not
// maintain them.
type OwnerlessRules struct {
	// Since is when KUBE-PROXY-CANARY was first seen missing.
	Since    time.Time      `json:"since"`
	Families []rules.Family `json:"families"`
	// Choices are the possible commands: the last if kube-proxy has left this node, the others,
	// by its way of running, if it belongs there.
	Choices []Choice `json:"choices"`
}

// LastSaved is when a generation was last written to disk; zero if there is none.
func (s Status) LastSaved() time.Time {
	var last time.Time
	for _, g := range s.Stored {
		if g.Saved.After(last) {
			last = g.Saved
		}
	}
	return last
}

// A Refused is a declared rule that iptables or the kernel refuses, in a Status. Its table
// keeps its former content. Rule and Reason leave through the control socket only.
type Refused struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	// Chain is the built-in chain of a jump. It is empty if the table is refused and no single rule
	// is the cause.
	Chain  string `json:"chain,omitempty"`
	Source string `json:"source,omitempty"` // manifest or rules-dir
	Where  string `json:"where,omitempty"`  // the operator's own file and line
	// Class is the reason as metrics have it. Meaning is the same in words that quote nothing.
	Class   iptables.Reason `json:"class"`
	Meaning string          `json:"meaning"`
	Rule    string          `json:"rule,omitempty"`
	Reason  string          `json:"reason,omitempty"` // in the words of iptables or the kernel
	Since   time.Time       `json:"since"`
}

// Place names the rule without quoting it: the operator's file and line, else its table.
func (r Refused) Place() string {
	return cmp.Or(r.Where, strings.TrimSpace(fmt.Sprintf("%s %s %s", r.Family, r.Table, r.Chain)))
}

// LastFlush returns the record of the last flush. An operator's request is no flush, and
// neither is a drill.
func (s Status) LastFlush() (last Flush, ok bool) {
	for _, f := range s.Flushes {
		if !f.Requested() && f.Drill == "" && (!ok || f.Latest().After(last.Latest())) {
			last, ok = f, true
		}
	}
	return last, ok
}

// A SourceError is a problem with the files of a declared source, in a Status. Reason may quote
// a file, and leaves through the control socket only.
type SourceError struct {
	Source string    `json:"source"` // manifest or rules-dir
	Where  string    `json:"where"`  // file and line, or as much as is known
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since"`
	// InForce names the rules that are in force instead of the files'.
	InForce Instead `json:"inForce"`
}

// Instead names the rules that are in force while a source's files cannot be used.
type Instead string

// The values of Instead.
const (
	LastGood   Instead = "last_good" // the rules that this run read from them before
	StoredGood Instead = "stored"    // the rules that an earlier run read from them
	NoneGood   Instead = "nothing"   // no rules, because none of the files' are known
	AllButThis Instead = "rest"      // all rules of the files except this document's
)

// unusable reports whether none of the source's files can be used.
func (e SourceError) unusable() bool { return e.InForce != AllButThis }

// Line names the broken part, and the rules that are in force instead, in one line. It quotes
// nothing of a file, because the page shows it.
func (e SourceError) Line() string {
	if !e.unusable() {
		return fmt.Sprintf("%s: a document in %s declares nothing, the rest of its file counts", e.Source, e.Where)
	}
	return fmt.Sprintf("%s cannot be used because of %s: %s", e.Source, e.Where, map[Instead]string{
		LastGood:   "its last good rules stay in force",
		StoredGood: "the rules that an earlier run read from it are in force",
		NoneGood:   "its rules are not known, and not in force",
	}[e.InForce])
}

// BrokenSource returns why the declared rules are not those of the files; nil if they are. The
// node then counts as refused, and Health and the page give this reason.
func (s Status) BrokenSource() error {
	for _, e := range s.SourceErrors {
		if e.unusable() {
			return fmt.Errorf("%s", e.Line())
		}
	}
	return nil
}

// A KeeperState is the keeper's state for a family.
type KeeperState string

// The states of a family's keeper.
const (
	KeeperKept        KeeperState = "kept"        // established connections survive a flush
	KeeperIdle        KeeperState = "idle"        // no protected rule translates
	KeeperUnavailable KeeperState = "unavailable" // the kernel refuses it; canaryd tries again
	KeeperOff         KeeperState = "off"         // by --keeper, in observe mode, or after a cleanup
)

// Upper returns text with a capital first letter.
func Upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// A Choice is a command, with the case in which it is right.
type Choice struct {
	If      string `json:"if"`
	Command string `json:"command"`
}

// TablesText names tables with their verdicts: "ipv4 nat emptied, ipv6 nat emptied".
func TablesText(verdicts map[rules.Family]Verdicts) string {
	var words []string
	for id, v := range Tables(verdicts) {
		if v != "" {
			words = append(words, fmt.Sprintf("%s %s", id, v))
		}
	}
	return strings.Join(words, ", ")
}

// ErrAlreadyRunning means that another canaryd guards this network namespace.
var ErrAlreadyRunning = errors.New("another canaryd runs in this network namespace")

// KeeperStates returns every KeeperState.
func KeeperStates() []KeeperState {
	return []KeeperState{KeeperKept, KeeperIdle, KeeperUnavailable, KeeperOff}
}

// A LeftOut is a chain that is not guarded, because there are more rules than canaryd keeps
// (--max-rules).
type LeftOut struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"` // of a built-in chain, the jumps in it are not guarded
	Rules  int             `json:"rules"` // at the last count
}

// String names the chain and counts its rules.
func (l LeftOut) String() string {
	return fmt.Sprintf("%s %s %s: it holds %d rules", l.Family, l.Table, l.Chain, l.Rules)
}

// LeftOutShown is how many chains a Status lists; the metric counts all.
const LeftOutShown = 100

// A LedTo is a chain of another owner that is guarded because a protected rule leads to it.
type LedTo struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"`
	From   string          `json:"from"` // the first chain that has such a rule
}

// String names the chain and says why it is guarded.
func (l LedTo) String() string {
	return fmt.Sprintf("%s %s %s, because %s leads to it", l.Family, l.Table, l.Chain, l.From)
}

// LedToShown is how many chains a Status lists.
const LedToShown = 100

// A LeadsOut is a built-in chain with rules that a word rule: of --protect names. They are not
// guarded, because they lead into a chain that no word names.
type LeadsOut struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"`
	To     string          `json:"to"` // the chain that they lead to
}

// String names the chains.
func (l LeadsOut) String() string {
	return fmt.Sprintf("%s %s: rules of %s that lead to %s", l.Family, l.Table, l.Chain, l.To)
}

// LeadsOutShown is how many a Status lists.
const LeadsOutShown = 100

// CountText counts items of a Status: "one chain", "2 chains". With as many items as it may
// list, shown, there may be more: "100 chains or more".
func CountText(n, shown int, what string) string {
	switch {
	case n == 1:
		return "one " + what
	case n >= shown:
		return fmt.Sprintf("%d %ss or more", n, what)
	default:
		return fmt.Sprintf("%d %ss", n, what)
	}
}
