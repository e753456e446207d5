package protect_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestRuleWords: a word "rule:" names the rules of one built-in chain whose whole text or
// comment it matches.
func TestRuleWords(t *testing.T) {
	const (
		wireguard = "-i wg0 -j ACCEPT"
		masq      = "-s 10.66.66.0/24 -o eth0 -j MASQUERADE"
		kube2iam  = "-d 169.254.169.254/32 -i cali+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.10:8181"
		microk8s  = `-s 10.1.0.0/16 -m comment --comment "generated for MicroK8s pods" -j ACCEPT`
		aws       = `-m comment --comment "AWS, CONNMARK" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80`
		felix     = `-m comment --comment cali:S93hcgKJrXEqnTfs -m comment --comment "Policy explicitly accepted packet." -j ACCEPT`
		quoted    = `-m comment --comment "office \"A\": don't touch" -j ACCEPT`
	)
	type at struct {
		table rules.TableName
		chain string
		spec  string
	}
	for word, test := range map[string]struct{ yes, no []at }{
		"rule:filter:FORWARD:-i wg0 -j ACCEPT": {
			yes: []at{{rules.Filter, "FORWARD", wireguard}},
			no: []at{
				{rules.Filter, "INPUT", wireguard}, {rules.Mangle, "FORWARD", wireguard}, {rules.Filter, "FORWARD", "-i wg0 -j DROP"},
				{rules.Filter, "FORWARD", "-i wg0 -p tcp -j ACCEPT"}, {rules.Filter, "FORWARD", "-i wg0"}, {rules.Filter, "FORWARD", ""},
			},
		},
		"rule:nat:POSTROUTING:-s 10.66.66.0/24 *": {yes: []at{{rules.Nat, "POSTROUTING", masq}}, no: []at{{rules.Nat, "POSTROUTING", "-o eth0 -j MASQUERADE"}}},
		"rule:nat:PREROUTING:*--to-destination 192.0.2.10:8181": {
			yes: []at{{rules.Nat, "PREROUTING", kube2iam}}, no: []at{{rules.Nat, "OUTPUT", kube2iam}, {rules.Nat, "PREROUTING", kube2iam + "1"}},
		},
		"rule:filter:FORWARD:generated for MicroK8s pods": {
			yes: []at{{rules.Filter, "FORWARD", microk8s}},
			no:  []at{{rules.Filter, "FORWARD", strings.ReplaceAll(microk8s, "pods", "pods too")}, {rules.Filter, "FORWARD", "-m string --string generated -j ACCEPT"}},
		},
		"rule:nat:PREROUTING:AWS? CONNMARK":                   {yes: []at{{rules.Nat, "PREROUTING", aws}}, no: []at{{rules.Nat, "PREROUTING", strings.Replace(aws, ",", "..", 1)}}},
		"rule:nat:PREROUTING:AWS, *":                          {yes: []at{{rules.Nat, "PREROUTING", aws}}},
		"rule:filter:FORWARD:cali:*":                          {yes: []at{{rules.Filter, "FORWARD", felix}}, no: []at{{rules.Filter, "FORWARD", microk8s}}},
		"rule:filter:FORWARD:Policy explicitly accepted*":     {yes: []at{{rules.Filter, "FORWARD", felix}}}, // the second comment
		`rule:filter:FORWARD:office "A": don't touch`:         {yes: []at{{rules.Filter, "FORWARD", quoted}}},
		`rule:filter:FORWARD:*--comment "generated * -j ACC*`: {yes: []at{{rules.Filter, "FORWARD", microk8s}}},
		"rule:filter:FORWARD:*": {
			yes: []at{{rules.Filter, "FORWARD", wireguard}, {rules.Filter, "FORWARD", quoted}, {rules.Filter, "FORWARD", ""}},
			no:  []at{{rules.Filter, "INPUT", wireguard}, {rules.Filter, "FORWARD", rules.OpaqueBytes([]byte("x"), nil, "ACCEPT", "no text").Spec}},
		},
		"rule:filter:FORWARD:[^\\-]*": {no: []at{{rules.Filter, "FORWARD", wireguard}}},
	} {
		s := selector(t, word)
		for want, list := range map[bool][]at{true: test.yes, false: test.no} {
			for _, p := range list {
				r, err := rules.ParseRule(p.spec)
				if err != nil {
					t.Fatal(err)
				}
				if got := s.Protection().Rule(p.table, p.chain, r); got != want {
					t.Errorf("%s names %s %s %q: %t", word, p.table, p.chain, p.spec, got)
				}
			}
		}
		if s.Protects("FORWARD") || s.Protects("cali-FORWARD") || s.Native() {
			t.Errorf("%s names chains or tables too", word)
		}
	}
}

// TestRuleWordsThatAreWrong: the error names the word and the correct form.
func TestRuleWordsThatAreWrong(t *testing.T) {
	for word, want := range map[string]string{
		"rule:":                            "is not rule:TABLE:CHAIN:GLOB",
		"rule:filter":                      "is not rule:TABLE:CHAIN:GLOB",
		"rule:filter:FORWARD":              "is not rule:TABLE:CHAIN:GLOB",
		"rule:filter:FORWARD:":             "is not rule:TABLE:CHAIN:GLOB",
		"rule:filters:FORWARD:*":           "names no table that canaryd guards",
		"rule::FORWARD:*":                  "names no table that canaryd guards",
		"rule:*:FORWARD:*":                 "names no table that canaryd guards",
		"rule:filter:DOCKER-USER:*":        "names no built-in chain of filter",
		"rule:filter:PREROUTING:*":         "names no built-in chain of filter",
		"rule:filter::*":                   "names no built-in chain of filter",
		"rule:filter:FORWARD:[a-":          "is not a glob of comments or rules",
		`rule:filter:FORWARD:a\`:           "is not a glob of comments or rules",
		"rule:filter:FORWARD:" + long(257): "has a glob of 257 bytes",
		"rules:filter:FORWARD:-i wg0 *":    "begins neither with nft: nor with rule:",
		"ruel:filter:FORWARD:*":            "begins neither with nft: nor with rule:",
		"-i wg0 -j ACCEPT":                 "no chain of iptables has a space",
		`MY-"CHAIN"`:                       "no chain of iptables has a space or a quote",
	} {
		_, err := protect.NewSelector([]string{"kube", word})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error is %v, want one that says %q", word, err, want)
		}
	}
	selector(t, "rule:filter:FORWARD:"+long(256))
	many := make([]string, 65)
	for i := range many {
		many[i] = fmt.Sprintf("rule:filter:FORWARD:-i wg%d -j ACCEPT", i)
	}
	selector(t, many[:64]...)
	if _, err := protect.NewSelector(many); err == nil || !strings.Contains(err.Error(), "more than 64 words begin with rule:") {
		t.Errorf("65 words: error is %v", err)
	}
}

func long(n int) string { return strings.Repeat("x", n) }

// TestWordsGoTogetherAndApart: a list of words becomes one value of the flag and back, with any
// characters.
func TestWordsGoTogetherAndApart(t *testing.T) {
	for value, words := range map[string][]string{
		"kube,cni,MY-*": {"kube", "cni", "MY-*"},
		`kube,"rule:nat:PREROUTING:AWS, CONNMARK"`:       {"kube", "rule:nat:PREROUTING:AWS, CONNMARK"},
		`"rule:filter:FORWARD:*--comment ""a, b""*",cni`: {`rule:filter:FORWARD:*--comment "a, b"*`, "cni"},
	} {
		if d := cmp.Diff(value, protect.Join(words)); d != "" {
			t.Errorf("together (-want +got):\n%s", d)
		}
		got, err := protect.Split(value)
		if d := cmp.Diff(words, got); d != "" || err != nil {
			t.Errorf("apart (-want +got), error %v:\n%s", err, d)
		}
	}
	if _, err := protect.Split(`kube,rule:filter:FORWARD:"`); err == nil {
		t.Error("a lone quote is no error")
	}
}

// FuzzRuleWord: no word and no rule may cause a panic. An accepted word names rules of its own
// chain only, and the flag's value brings back each word.
func FuzzRuleWord(f *testing.F) {
	f.Add("rule:filter:FORWARD:*wg0*", "-i wg0 -j ACCEPT")
	f.Add(`rule:nat:PREROUTING:"AWS, CONNMARK"`, `-m comment --comment "AWS, CONNMARK" -j CONNMARK`)
	f.Add("rule:filter:FORWARD:[a-]*\\", "--comment")
	f.Add("rule:filter:FORWARD:\xff*", "-m comment --comment \"\xff\" -j \xc3")
	f.Fuzz(func(t *testing.T, word, spec string) {
		s, err := protect.NewSelector([]string{word})
		if err != nil {
			return
		}
		r, err := rules.ParseRule(spec)
		if err != nil {
			return
		}
		for _, table := range rules.AllTables() {
			for _, chain := range rules.BuiltinChains(rules.TableName(table)) {
				named := s.Protection().Rule(rules.TableName(table), chain, r)
				if own := strings.HasPrefix(strings.TrimSpace(word), "rule:"+string(table)+":"+chain+":"); named && !own && strings.HasPrefix(strings.TrimSpace(word), "rule:") {
					t.Errorf("%q names %q in %s %s", word, spec, table, chain)
				}
			}
		}
		if words, err := protect.Split(protect.Join([]string{"kube", word})); err == nil && !strings.Contains(word, "\r") {
			if d := cmp.Diff([]string{"kube", word}, words); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		} else if err != nil {
			t.Errorf("%q: %v", word, err)
		}
	})
}
