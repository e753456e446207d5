package canary

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

const nonce = Nonce("0123456789abcdef")

// node is a small nat table with its marks, as iptables-save prints it.
const node = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
-A PREROUTING -i lo -j ACCEPT
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m comment --comment "canaryd-witness:0123456789abcdef"
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "canaryd-witness:0123456789abcdef"
-A POSTROUTING -j KUBE-POSTROUTING
-A POSTROUTING -m comment --comment "canaryd-witness:0123456789abcdef"
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30001 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -m tcp -j DNAT --to-destination 10.1.0.1:80
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-AAAAAAAAAAAAAAAA
COMMIT
`

const (
	svc, sep = "KUBE-SVC-AAAAAAAAAAAAAAAA", "KUBE-SEP-AAAAAAAAAAAAAAAA"

	jumpPre  = `-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`
	jumpOut  = `-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`
	jumpPost = `-A POSTROUTING -j KUBE-POSTROUTING`
)

func protects(chain string) bool {
	return strings.HasPrefix(chain, "KUBE-") && !strings.HasSuffix(chain, "-CANARY")
}

func tableOf(t testing.TB, text string) *rules.Table {
	t.Helper()
	set := savefile.Tables(t, text)
	for _, table := range set {
		return table
	}
	return nil
}

func seenTable(table *rules.Table) Seen {
	return Seen{Table: table, Section: rules.Protection{Chain: protects}.Extract(table, IsMark)}
}

// wantedOf returns the wanted content of a table in which every mark is present.
func wantedOf(t testing.TB, text string) Wanted {
	t.Helper()
	table := tableOf(t, text)
	s := rules.Protection{Chain: protects}.Extract(table, IsMark)
	return Wanted{CanaryChain: DefaultChain, Mark: Mark{Nonce: nonce, Witnessed: s.JumpChains(table.Name)}, Section: s}
}

// An edit is a change of a table's text.
type edit func(text string) string

// flushed does iptables -F CHAIN for each chain, or iptables -F without chains.
func flushed(chains ...string) edit {
	return func(text string) string {
		return filterLines(text, func(line string) bool {
			words := strings.Fields(line)
			return words[0] == "-A" && (len(chains) == 0 || contains(chains, words[1]))
		})
	}
}

// deleted does iptables -F and -X of each chain.
func deleted(chains ...string) edit {
	return func(text string) string {
		return filterLines(flushed(chains...)(text), func(line string) bool {
			return line[0] == ':' && contains(chains, strings.Fields(line[1:])[0])
		})
	}
}

// without does iptables -D of each rule.
func without(rules ...string) edit {
	return func(text string) string {
		return filterLines(text, func(line string) bool { return contains(rules, line) })
	}
}

// with appends lines: rules, or chains with their rules.
func with(lines ...string) edit {
	return func(text string) string {
		return strings.Replace(text, "COMMIT\n", strings.Join(lines, "\n")+"\nCOMMIT\n", 1)
	}
}

func replaced(old, new string) edit {
	return func(text string) string { return strings.ReplaceAll(text, old, new) }
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
}

func filterLines(text string, drop func(line string) bool) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if !drop(strings.TrimSuffix(line, "\n")) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// summary is a Finding with its jumps as the commands that append them.
type summary struct {
	Verdict                                     Verdict
	MarkLost                                    bool
	Witnesses, Jumps, Waiting, Emptied, Missing []string
}

func summarize(f Finding) summary {
	s := summary{Verdict: f.Verdict, MarkLost: f.MarkLost, Witnesses: f.Witnesses, Emptied: f.Emptied, Missing: f.Missing}
	for _, h := range f.Jumps {
		s.Jumps = append(s.Jumps, h.String())
	}
	for _, h := range f.Waiting {
		s.Waiting = append(s.Waiting, h.String())
	}
	return s
}

var (
	jumped = []string{"PREROUTING", "OUTPUT", "POSTROUTING"}
	jumps3 = []string{jumpPre, jumpOut, jumpPost}
	chains = []string{"KUBE-MARK-MASQ", "KUBE-NODEPORTS", "KUBE-POSTROUTING", sep, "KUBE-SERVICES", svc}
)

func TestJudgeTellsLossFromDecision(t *testing.T) {
	intact := summary{Verdict: Intact}
	changed := summary{Verdict: Changed}
	tests := []struct {
		name  string
		edits []edit
		quiet bool
		want  summary
	}{
		{name: "nothing happened", want: intact},
		{name: "nothing happened for long", quiet: true, want: intact},

		// The canary.
		{
			name: "-F empties the table and keeps its chains", edits: []edit{flushed()},
			want: summary{Emptied, true, jumped, jumps3, nil, chains, nil},
		},
		{
			name: "-F and -X leave built-in chains alone", edits: []edit{flushed(), deleted(append(chains, DefaultChain)...)},
			want: summary{ChainDeleted, true, jumped, jumps3, nil, nil, chains},
		},
		{
			name:  "-F and then half of its rules back by their owner",
			edits: []edit{flushed(), with(jumpPre, "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000")},
			want:  summary{Emptied, true, jumped, []string{jumpOut, jumpPost}, nil, chains[1:], nil},
		},
		{
			name: "the canary's chain alone was flushed", edits: []edit{flushed(DefaultChain)},
			want: summary{Verdict: Emptied, MarkLost: true},
		},
		{
			name: "the canary's chain alone was deleted", edits: []edit{deleted(DefaultChain)},
			want: summary{Verdict: ChainDeleted, MarkLost: true},
		},
		{
			name: "a file saved under an old nonce was restored", edits: []edit{replaced(string(nonce), "fedcba9876543210")},
			want: summary{Verdict: Replaced, MarkLost: true, Witnesses: jumped},
		},
		{
			name: "a second rule in the canary", edits: []edit{with("-A KUBE-CANARYD-CANARY -j RETURN")},
			want: summary{Verdict: Replaced, MarkLost: true},
		},
		{
			name: "a second copy of the canary's rule", edits: []edit{with("-A KUBE-CANARYD-CANARY " + nonce.Rule().Spec)},
			want: summary{Verdict: Replaced, MarkLost: true},
		},
		{
			name:  "the canary's rule has become another",
			edits: []edit{replaced("canaryd-canary:", "canaryd-witness:")},
			want:  summary{Verdict: Replaced, MarkLost: true},
		},
		{
			name:  "a saved file is restored: jumps in other words are no newer, so they do not supersede",
			edits: []edit{replaced(string(nonce), "0"), replaced(jumpOut, "-A OUTPUT -j KUBE-SERVICES")},
			want:  summary{Replaced, true, jumped, []string{jumpOut}, nil, nil, nil},
		},
		{
			name:  "after -F the owner has jumped again in other words, which are newer",
			edits: []edit{flushed(), with("-A OUTPUT -p tcp -j KUBE-SERVICES")},
			want:  summary{Emptied, true, jumped, []string{jumpPre, jumpPost}, nil, chains, nil},
		},

		// Witnesses and jumps.
		{
			name: "one built-in chain was flushed", edits: []edit{flushed("OUTPUT")},
			want: summary{Verdict: JumpsMissing, Witnesses: []string{"OUTPUT"}, Jumps: []string{jumpOut}},
		},
		{
			name: "a built-in chain was flushed and its owner jumped again", edits: []edit{flushed("OUTPUT"), with(jumpOut)},
			want: summary{Verdict: JumpsMissing, Witnesses: []string{"OUTPUT"}},
		},
		{
			name:  "the witness alone was deleted, the jump stands",
			edits: []edit{without(`-A OUTPUT -m comment --comment "canaryd-witness:0123456789abcdef"`)},
			want:  summary{Verdict: JumpsMissing, Witnesses: []string{"OUTPUT"}},
		},
		{
			name:  "the witness is another planting's",
			edits: []edit{replaced(`-A OUTPUT -m comment --comment "canaryd-witness:0123456789abcdef"`, `-A OUTPUT -m comment --comment "canaryd-witness:0"`)},
			want:  summary{Verdict: JumpsMissing, Witnesses: []string{"OUTPUT"}},
		},
		{
			name: "a jump was deleted by name a moment ago", edits: []edit{without(jumpOut)},
			want: summary{Verdict: Changed, Waiting: []string{jumpOut}},
		},
		{
			name: "a jump was deleted by name and nothing followed", edits: []edit{without(jumpOut)}, quiet: true,
			want: summary{Verdict: JumpsMissing, Jumps: []string{jumpOut}},
		},
		{
			name: "its target is gone: the owner is leaving", edits: []edit{without(jumpPost), deleted("KUBE-POSTROUTING")},
			quiet: true, want: summary{Verdict: Changed},
		},
		{
			name: "jump and target are gone", edits: []edit{without(jumpPre, jumpOut), deleted("KUBE-SERVICES", "KUBE-NODEPORTS", svc, sep)},
			quiet: true, want: summary{Verdict: Changed},
		},
		{
			name:  "the jump was rewritten by its owner",
			edits: []edit{replaced(jumpOut, "-A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES")}, quiet: true,
			want: changed,
		},
		{
			name:  "a jump to the same target that stood before supersedes nothing",
			edits: []edit{without(jumpOut), with(jumpPre)}, quiet: true,
			want: summary{Verdict: JumpsMissing, Jumps: []string{jumpOut}},
		},
		{
			name: "two chains: one flushed, in the other a jump deleted by name", edits: []edit{flushed("OUTPUT"), without(jumpPre)},
			want: summary{Verdict: JumpsMissing, Witnesses: []string{"OUTPUT"}, Jumps: []string{jumpOut}, Waiting: []string{jumpPre}},
		},

		// Content.
		{
			name: "a chain that is never empty was flushed", edits: []edit{flushed("KUBE-MARK-MASQ")},
			want: summary{Verdict: Emptied, Emptied: []string{"KUBE-MARK-MASQ"}},
		},
		{
			name: "the services were flushed and what hung below them removed", edits: []edit{flushed("KUBE-SERVICES"), deleted(svc, sep)},
			want: summary{Verdict: Emptied, Emptied: []string{"KUBE-SERVICES"}, Missing: []string{sep, svc}},
		},
		{
			name: "an emptied chain leaves a full one behind that no other rule references", edits: []edit{flushed(svc)},
			want: summary{Verdict: Emptied, Emptied: []string{svc}},
		},
		{
			name: "an emptied chain whose targets others know too was emptied on purpose", edits: []edit{flushed("KUBE-NODEPORTS")},
			want: changed,
		},
		{
			name:  "a service's chain was emptied, and its target moved under another one",
			edits: []edit{flushed(svc), with("-A KUBE-NODEPORTS -j " + sep)},
			want:  summary{Verdict: Emptied, Emptied: []string{svc}},
		},
		{
			name:  "an orphan that two chains no longer reference is no loss",
			edits: []edit{flushed("KUBE-NODEPORTS"), without("-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j " + svc)},
			want:  changed,
		},
		{
			name: "a service's chain was emptied, and its endpoint's is gone", edits: []edit{flushed(svc), deleted(sep)},
			want: summary{Verdict: Emptied, Emptied: []string{svc}, Missing: []string{sep}},
		},
		{
			name: "a service's chain and its endpoint's were emptied", edits: []edit{flushed(svc, sep)},
			want: summary{Verdict: Emptied, Emptied: []string{svc, sep}},
		},
		{
			name: "an endpoint's chain was emptied", edits: []edit{flushed(sep)},
			want: summary{Verdict: Emptied, Emptied: []string{sep}},
		},
		{
			name: "an endpoint went, but for its empty chain", edits: []edit{flushed(sep), without("-A " + svc + " -j " + sep), with("-A " + svc + " -j RETURN")},
			want: changed,
		},
		{
			name:  "an endpoint's chain was emptied while another service went",
			edits: []edit{flushed(sep), without("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"), deleted("KUBE-NODEPORTS")},
			want:  summary{Verdict: Emptied, Emptied: []string{sep}},
		},
		{
			name: "a flushed content chain and a flushed built-in chain", edits: []edit{flushed("KUBE-SERVICES", "PREROUTING")},
			want: summary{Verdict: Emptied, Witnesses: []string{"PREROUTING"}, Jumps: []string{jumpPre}, Emptied: []string{"KUBE-SERVICES"}},
		},
		{
			name: "a chain was removed by its owner", edits: []edit{without("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"), deleted("KUBE-NODEPORTS")},
			quiet: true, want: changed,
		},
		{
			name:  "even one that is never empty",
			edits: []edit{without(jumpPost), deleted("KUBE-POSTROUTING", "KUBE-MARK-MASQ")}, quiet: true, want: changed,
		},
		{name: "a chain came", edits: []edit{with(":KUBE-SVC-BBBBBBBBBBBBBBBB - [0:0]")}, want: changed},
		{name: "a rule came", edits: []edit{with("-A KUBE-SERVICES -d 10.96.0.2/32 -j KUBE-MARK-MASQ")}, want: changed},
		{name: "an endpoint was replaced", edits: []edit{replaced("10.1.0.1:80", "10.1.0.2:80")}, want: changed},
		{name: "a jump came", edits: []edit{with("-A INPUT -j KUBE-NODEPORTS")}, want: changed},
		{
			name:  "rules in another order",
			edits: []edit{without("-A KUBE-POSTROUTING -j MASQUERADE"), replaced("-A KUBE-POSTROUTING -m mark", "-A KUBE-POSTROUTING -j MASQUERADE\n-A KUBE-POSTROUTING -m mark")},
			want:  changed,
		},
		{name: "foreign rules came, went and moved", edits: []edit{without("-A PREROUTING -i lo -j ACCEPT"), with("-A PREROUTING -j ACCEPT", ":corp - [0:0]")}, want: intact},
		{name: "chains in another order", edits: []edit{deleted("KUBE-NODEPORTS"), with(":KUBE-NODEPORTS - [0:0]", "-A KUBE-NODEPORTS -p tcp -m tcp --dport 30001 -j "+svc)}, want: intact},
		{name: "a jump in another place", edits: []edit{without(jumpPre), with(jumpPre)}, want: intact},
		{name: "a policy", edits: []edit{replaced(":OUTPUT ACCEPT", ":OUTPUT DROP")}, want: intact},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			text := node
			for _, e := range test.edits {
				text = e(text)
			}
			seen := seenTable(tableOf(t, text))
			seen.Quiet = test.quiet
			got := summarize(Judge(wantedOf(t, node), seen))
			if d := cmp.Diff(test.want, got, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}
