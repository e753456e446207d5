package scenario

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

const whole = `*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [7:8]
:KUBE-FORWARD - [0:0]
:KUBE-FIREWALL - [0:0]
:theirs - [0:0]
-A INPUT -i lo -j ACCEPT
-A INPUT -j KUBE-FIREWALL
-A INPUT -j theirs
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -s 10.0.0.1/32 -j ACCEPT
-A KUBE-FORWARD -s 10.0.0.2/32 -j ACCEPT
-A theirs -s 10.0.0.3/32 -j DROP
COMMIT
`

func TestCompare(t *testing.T) {
	for name, c := range map[string]struct {
		control string   // the others' rules after the flush; empty: all
		edit    []string // pairs for strings.NewReplacer, on the repaired rules
		late    bool     // the flush continued after the repair
		want    []string // parts of the lines, one each
	}{
		"the same": {},
		"our own marks and canaries do not count": {edit: []string{
			":theirs", ":KUBE-CANARYD-CANARY - [0:0]\n:KUBE-PROXY-CANARY - [0:0]\n:theirs",
			"-A INPUT -j theirs\n", "-A INPUT -j theirs\n-A INPUT -m comment --comment \"canaryd-witness:1\"\n",
		}},
		"counters do not count": {edit: []string{"[7:8]", "[9:9]"}},
		"protected chain missing": {
			edit: []string{":KUBE-FORWARD - [0:0]\n", "", "-A KUBE-FORWARD -s 10.0.0.1/32 -j ACCEPT\n", "", "-A KUBE-FORWARD -s 10.0.0.2/32 -j ACCEPT\n", ""},
			want: []string{"filter: protected chain KUBE-FORWARD is missing"},
		},
		"protected rule missing": {
			edit: []string{"-A KUBE-FORWARD -s 10.0.0.1/32 -j ACCEPT\n", ""},
			want: []string{"protected rule of KUBE-FORWARD is missing: -s 10.0.0.1/32 -j ACCEPT"},
		},
		"protected rules in another order": {
			edit: []string{"10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.1"},
			want: []string{"protected rules of KUBE-FORWARD are in another order"},
		},
		"jump missing": {
			edit: []string{"-A FORWARD -j KUBE-FORWARD\n", ""},
			want: []string{"jump rule of FORWARD is missing: -j KUBE-FORWARD"},
		},
		"jump doubled": {
			edit: []string{"-A FORWARD -j KUBE-FORWARD\n", "-A FORWARD -j KUBE-FORWARD\n-A FORWARD -j KUBE-FORWARD\n"},
			want: []string{"jump rule of FORWARD is there 2 times and should be there 1 times"},
		},
		"jump elsewhere": {
			edit: []string{"-A INPUT -i lo -j ACCEPT\n-A INPUT -j KUBE-FIREWALL\n", "-A INPUT -j KUBE-FIREWALL\n-A INPUT -i lo -j ACCEPT\n"},
			want: []string{"jumps of INPUT stand elsewhere"},
		},
		"jump elsewhere where the same rules were written again afterwards": {
			edit: []string{"-A INPUT -i lo -j ACCEPT\n-A INPUT -j KUBE-FIREWALL\n", "-A INPUT -j KUBE-FIREWALL\n-A INPUT -i lo -j ACCEPT\n"},
			late: true,
		},
		"jump elsewhere where the neighbours were lost": {
			control: "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n:theirs - [0:0]\n-A theirs -s 10.0.0.3/32 -j DROP\n-A INPUT -j theirs\nCOMMIT\n",
			edit:    []string{"-A INPUT -i lo -j ACCEPT\n", ""},
		},
		"policy overwritten": {
			edit: []string{"FORWARD DROP", "FORWARD ACCEPT"},
			want: []string{"the policy of FORWARD is ACCEPT and should be DROP"},
		},
		"foreign rule missing": {
			edit: []string{"-A theirs -s 10.0.0.3/32 -j DROP\n", ""},
			want: []string{"foreign rule of theirs is missing"},
		},
		"foreign rule brought back": {
			control: "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\nCOMMIT\n",
			want: []string{
				"foreign rule of INPUT is there and should not be: -i lo -j ACCEPT",
				"foreign rule of INPUT is there and should not be: -j theirs",
				"foreign chain theirs is there and should not be",
			},
		},
		"table missing": {
			control: "# nothing\n", edit: []string{whole, ""},
			want: []string{"jump rule of INPUT", "jump rule of FORWARD", "KUBE-FIREWALL is missing", "KUBE-FORWARD is missing"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if c.control == "" {
				c.control = whole
			}
			want := Want{Protected: parse(t, whole), Foreign: parse(t, c.control), Late: c.late, Protects: selector(t).Protects}
			got := Compare(want, parse(t, strings.NewReplacer(c.edit...).Replace(whole)))
			if len(got) != len(c.want) {
				t.Fatalf("Compare says\n%s\nwant %d lines", strings.Join(got, "\n"), len(c.want))
			}
			for i := range got {
				if !strings.Contains(got[i], c.want[i]) {
					t.Errorf("line %d is %q, want %q in it", i, got[i], c.want[i])
				}
			}
		})
	}
}

func parse(t *testing.T, text string) rules.Ruleset {
	t.Helper()
	set := savefile.Tables(t, text)
	return set
}
