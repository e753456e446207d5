package protect

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lackNode has the rules of portmap and ipMasq for one pod.
const lackNode = `*nat
:POSTROUTING ACCEPT [0:0]
:PREROUTING ACCEPT [0:0]
:CNI-DN-46d5e6e569f30aa7e18e0 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -j CNI-HOSTPORT-DNAT
-A CNI-DN-46d5e6e569f30aa7e18e0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.88.0.2:80
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"cbr0\" id: \"5f1e0c6a2b7d4e89a1c3f5d7b9e1a3c5\"" -m multiport --dports 8080 -j CNI-DN-46d5e6e569f30aa7e18e0
-A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x2000/0x2000
COMMIT
`

// TestLacking: some rules of a pod are missing. Lacking must list them, and notice an order of
// deletion that no plugin has.
func TestLacking(t *testing.T) {
	web := Attachment{Network: "cbr0", Container: "5f1e0c6a2b7d4e89a1c3f5d7b9e1a3c5"}
	const own = "CNI-DN-46d5e6e569f30aa7e18e0"
	extract := func(drop ...string) rules.Section {
		var b strings.Builder
		for line := range strings.Lines(lackNode) {
			dropped := false
			for _, d := range drop {
				dropped = dropped || strings.HasPrefix(line, d)
			}
			if !dropped {
				b.WriteString(line)
			}
		}
		set := savefile.Tables(t, b.String())
		s, err := NewSelector([]string{"cni"})
		if err != nil {
			t.Fatal(err)
		}
		return s.Protection().Extract(set[rules.Nat], func(rules.Rule) bool { return false })
	}
	type summary struct {
		Rules, Chains int
		Ahead         bool
	}
	for name, test := range map[string]struct {
		drop []string
		want map[Attachment]summary
	}{
		"nothing":                       {nil, map[Attachment]summary{}},
		"another's rule":                {[]string{"-A CNI-HOSTPORT-SETMARK"}, map[Attachment]summary{}},
		"the jump before its chain":     {[]string{"-A CNI-HOSTPORT-DNAT"}, map[Attachment]summary{web: {1, 0, true}}},
		"the chain's rules, as portmap": {[]string{"-A " + own}, map[Attachment]summary{web: {0, 1, false}}},
		"the jump behind them":          {[]string{"-A " + own, "-A CNI-HOSTPORT-DNAT"}, map[Attachment]summary{web: {1, 1, false}}},
		"all of it":                     {[]string{"-A " + own, ":" + own, "-A CNI-HOSTPORT-DNAT"}, map[Attachment]summary{web: {1, 1, false}}},
	} {
		got := map[Attachment]summary{}
		for a, l := range Lacking(extract(), extract(test.drop...), maps.Keys(map[Attachment]bool{web: true})) {
			got[a] = summary{len(l.Rules), len(l.Chains), l.Ahead}
		}
		if d := cmp.Diff(test.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}
