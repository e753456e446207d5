package canary

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// filterNode is node's filter table, with the chains of filter that are never empty.
const filterNode = `*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -j KUBE-FIREWALL
-A INPUT -p tcp -j KUBE-FIREWALL
-A INPUT -m comment --comment "canaryd-witness:0123456789abcdef"
-A FORWARD -j KUBE-FORWARD
-A FORWARD -j KUBE-SERVICES
-A FORWARD -m comment --comment "canaryd-witness:0123456789abcdef"
-A OUTPUT -j KUBE-FIREWALL
-A OUTPUT -m comment --comment "canaryd-witness:0123456789abcdef"
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A KUBE-FIREWALL -s 10.0.0.0/8 -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -s 10.0.0.0/8 -j ACCEPT
-A KUBE-SERVICES -d 10.96.0.1/32 -j REJECT --reject-with icmp-port-unreachable
COMMIT
`

// fuzzed are the tables that FuzzJudge damages, with their claimed chains and the rules of
// built-in chains that a preset names.
var fuzzed = []struct {
	text      string
	neverBare []string
	claimed   func(string) bool
	named     []string
}{
	{node, []string{"KUBE-SERVICES", "KUBE-MARK-MASQ", "KUBE-POSTROUTING"}, nil, nil},
	{filterNode, []string{"KUBE-FORWARD", "KUBE-FIREWALL"}, nil, nil},
	{node, []string{"KUBE-SERVICES", "KUBE-MARK-MASQ", "KUBE-POSTROUTING"}, claimedHere, nil},
	{filterNode, []string{"KUBE-FORWARD", "KUBE-FIREWALL"}, func(chain string) bool { return chain == "KUBE-FORWARD" }, nil},
	{dockerNode, nil, nil, []string{masq17, masq18}},
	{dockerNode, nil, func(string) bool { return true }, []string{masq17, masq18}},
}

// A ruin is a table's lines after some damage. Its methods answer FuzzJudge's questions from
// the text alone, without the tested functions.
type ruin []string

// ruinOf damages each line by the byte at its place. 1 deletes the line (a chain with all its
// rules), 2 doubles a rule, and 3 changes numbers in it. 4 adds a match to the rule, and 5
// flushes a chain.
func ruinOf(text string, fate []byte) ruin {
	var left ruin
	bare := map[string]bool{} // chains without rules
	for i, line := range strings.Split(strings.TrimSpace(text), "\n") {
		act := byte(0)
		if i < len(fate) {
			act = fate[i] % 6
		}
		words := strings.Fields(line)
		switch {
		case line[0] == '*' || line == "COMMIT":
			left = append(left, line)
		case line[0] == ':':
			bare[words[0][1:]] = act == 1 || act == 5
			if act != 1 {
				left = append(left, line)
			}
		case bare[words[1]] || act == 1:
		case act == 2:
			left = append(left, line, line)
		case act == 3:
			left = append(left, strings.ReplaceAll(line, "0", "1"))
		case act == 4:
			left = append(left, strings.Replace(line, words[1], words[1]+" -i lo", 1))
		default:
			left = append(left, line)
		}
	}
	return left
}

func (r ruin) has(line string) bool { return slices.Contains(r, line) }

func (r ruin) declares(chain string) bool {
	return slices.ContainsFunc(r, func(l string) bool { return strings.HasPrefix(l, ":"+chain+" ") })
}

// rules returns the lines that append to the chain.
func (r ruin) rules(chain string) []string {
	var found []string
	for _, l := range r {
		if strings.HasPrefix(l, "-A "+chain+" ") {
			found = append(found, l)
		}
	}
	return found
}

// jumps returns the lines that jump to the chain.
func (r ruin) jumps(chain string) []string {
	var found []string
	for _, l := range r {
		if words := strings.Fields(l); words[0] == "-A" && slices.Contains(words, chain) && words[1] != chain {
			found = append(found, l)
		}
	}
	return found
}

// hasOtherJump reports whether another rule of the same built-in chain jumps to the jump's
// target (reworded), and whether that rule is new (rejumped).
func (r ruin) hasOtherJump(before ruin, jump, chain, target string) (reworded, rejumped bool) {
	for _, l := range r.jumps(target) {
		if strings.HasPrefix(l, "-A "+chain+" ") && l != jump {
			reworded = true
			rejumped = rejumped || !before.has(l)
		}
	}
	return reworded, rejumped
}

// orphans reports whether the chain was emptied, and a chain that only it led to still holds
// rules and is no longer referenced.
func (r ruin) orphans(before ruin, chain string) bool {
	if !r.declares(chain) || len(r.rules(chain)) > 0 {
		return false
	}
	for _, rule := range before.rules(chain) {
		words := strings.Fields(rule)
		target := words[slices.Index(words, "-j")+1]
		only := !slices.ContainsFunc(before.jumps(target), func(l string) bool { return !strings.HasPrefix(l, "-A "+chain+" ") })
		if only && len(r.rules(target)) > 0 && len(r.jumps(target)) == 0 {
			return true
		}
	}
	return false
}

// FuzzJudge damages a table in every mix of ways and checks the promises of Judge. Judge must
// never report a loss as intact or changed, and never report a loss where nothing is lost.
func FuzzJudge(f *testing.F) {
	for which, table := range fuzzed {
		n := strings.Count(table.text, "\n")
		f.Add([]byte{}, uint8(which), false)
		for i := range n {
			for act := byte(1); act < 6; act++ {
				f.Add(slices.Concat(make([]byte, i), []byte{act}), uint8(which), i%2 == 0)
			}
		}
		f.Add(slices.Repeat([]byte{1}, n), uint8(which), true)
		f.Add(slices.Repeat([]byte{5}, n), uint8(which), true)
	}
	f.Fuzz(func(t *testing.T, fate []byte, which uint8, quiet bool) {
		scene := fuzzed[int(which)%len(fuzzed)]
		before, after := ruinOf(scene.text, nil), ruinOf(scene.text, fate)
		protection := rules.Protection{Chain: protects}
		if scene.named != nil {
			protection = protectsDocker(t)
		}
		whole, left := tableOf(t, scene.text), tableOf(t, strings.Join(after, "\n")+"\n")
		want := Wanted{CanaryChain: DefaultChain, Section: protection.Extract(whole, IsMark), Claimed: scene.claimed}
		want.Mark = Mark{Nonce: nonce, Witnessed: want.Section.JumpChains(whole.Name)}
		seen := Seen{Table: left, Section: protection.Extract(left, IsMark), Quiet: quiet}
		got := Judge(want, seen)

		loss := false // a check below found a loss
		lost := func(what string) {
			t.Helper()
			if loss = true; !got.Verdict.Loss() {
				t.Errorf("%s, and the verdict is %s", what, got.Verdict)
			}
		}
		foreign := func(chain string) bool { return want.Claimed == nil || !want.Claimed(chain) }
		marked := slices.Equal(after.rules(DefaultChain), []string{"-A " + DefaultChain + " " + nonce.Rule().Spec})
		if !marked {
			lost("the canary is lost")
		}
		if got.MarkLost == marked {
			t.Errorf("the canary stands: %t, and MarkLost is %t", marked, got.MarkLost)
		}
		for _, chain := range want.Mark.Witnessed {
			if stands := after.has("-A " + chain + " " + nonce.Witness().Spec); !stands {
				lost("the witness of " + chain + " is lost")
			} else if slices.Contains(got.Witnesses, chain) {
				t.Errorf("the witness of %s stands and is said to be lost", chain)
			}
		}
		for _, h := range want.Section.Jumps {
			line := h.String()
			if after.has(line) {
				continue
			}
			if got.Verdict == Intact {
				t.Errorf("%s is missing, and the table is intact", line)
			}
			if slices.Contains(scene.named, line) {
				// It leads nowhere. It is lost with its chain's witness or the canary, even if
				// other rules remain. A deletion by name is its owner's decision.
				flushed := !after.has("-A " + h.Chain + " " + nonce.Witness().Spec)
				if flushed {
					lost("the named " + line + " is missing")
				}
				if back := slices.ContainsFunc(got.Jumps, h.Same); back != (flushed || !marked) {
					t.Errorf("%s is put back: %t; its chain was flushed: %t, the canary stands: %t", line, back, flushed, marked)
				}
				if slices.ContainsFunc(got.Waiting, h.Same) {
					t.Errorf("%s is waited for", line)
				}
				continue
			}
			reworded, rejumped := after.hasOtherJump(before, line, h.Chain, h.Rule.Target)
			flushed := slices.Contains(got.Witnesses, h.Chain)
			switch {
			case !foreign(h.Rule.Target):
				lost("the claimed " + line + " is missing")
			case !marked:
			case flushed && !rejumped, !flushed && quiet && !reworded && len(after.rules(h.Rule.Target)) > 0:
				lost(line + " is missing")
				if !slices.ContainsFunc(got.Jumps, h.Same) {
					t.Errorf("%s is lost, and these are to be put back: %v", line, got.Jumps)
				}
			case !flushed && !reworded && len(after.rules(h.Rule.Target)) > 0:
				if !slices.ContainsFunc(got.Waiting, h.Same) {
					t.Errorf("%s may be lost, and these are waited for: %v", line, got.Waiting)
				}
			}
		}
		for _, c := range want.Section.Chains {
			bare := after.declares(c.Name) && len(after.rules(c.Name)) == 0 && len(c.Rules) > 0
			led := slices.ContainsFunc(after, func(line string) bool { return strings.HasSuffix(line, " -j "+c.Name) })
			whole := led && (strings.HasPrefix(c.Name, "KUBE-SVC-") || strings.HasPrefix(c.Name, "KUBE-SEP-")) // kube-proxy deletes such a chain with the rules that lead to it
			if bare && (slices.Contains(scene.neverBare, c.Name) || foreign(c.Name) && (whole || after.orphans(before, c.Name))) {
				lost(c.Name + " was emptied")
				if foreign(c.Name) && !slices.Contains(got.Emptied, c.Name) {
					t.Errorf("%s was emptied, and these are said to be: %v", c.Name, got.Emptied)
				}
			}
			if got.Verdict == Intact && !slices.Equal(before.rules(c.Name), after.rules(c.Name)) {
				t.Errorf("%s is another than before, and the table is intact", c.Name)
			}
		}
		if want.Claimed == nil && got.Verdict.Loss() && !loss {
			t.Errorf("nothing is lost, and the verdict is %s: %+v", got.Verdict, got)
		}
		if slices.Equal(before, after) && got.Verdict != Intact {
			t.Errorf("nothing happened, and the verdict is %s", got.Verdict)
		}
		if got.Verdict == Unknown || got.Err != nil {
			t.Errorf("everything could be read, and the verdict is %s with error %v", got.Verdict, got.Err)
		}
		seen.Err = errors.New("no")
		if v := Judge(want, seen).Verdict; v != Unknown {
			t.Errorf("unreadable, and it is %s", v)
		}
	})
}
