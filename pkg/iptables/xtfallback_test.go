package iptables

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A process that ignores the lock flushes a table whose rules iptables-restore writes first. The
// script is of the table before, and canaryd writes no part of it: not as text either.
func TestATextIsNotWrittenToATableThatWasFlushed(t *testing.T) {
	for _, tt := range []struct {
		name   string
		behind string // the input of iptables-restore behind which the process flushes
		hosts  bool   // the text makes two rules, so that only iptables-restore can write it
		tables int
	}{
		{"before its texts are read", "-A " + TextChain, false, 1},
		{"before the texts of the second table are read", "-A " + TextChain, false, 2},
		{"before the refused script is written as text", "-X " + TextChain, true, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
				text := rules.Rule{Spec: "-p tcp -m quota --quota 7 -j ACCEPT", Target: "ACCEPT"}
				if tt.hosts {
					hosts := map[rules.Family]string{rules.IPv4: "192.0.2.1,192.0.2.2", rules.IPv6: "2001:db8::1,2001:db8::2"}[family]
					text.Spec = "-s " + hosts + " -j ACCEPT"
				}
				for _, line := range []string{"-N MINE", "-A FORWARD -p udp -j DROP", "-t mangle -N MINE"} {
					iptablesCommand(t, Legacy, family, line)
				}
				scripts := []Script{replayOf(rules.Filter, "MINE", []rules.Rule{text})}
				if tt.tables == 2 {
					plain := rules.Rule{Spec: "-p udp -j ACCEPT", Target: "ACCEPT"}
					scripts = slices.Insert(scripts, 0, replayOf(rules.Mangle, "MINE", []rules.Rule{plain}))
				}
				flush := program(Legacy, family, "")
				standInRestore(t, k, family, `cat >"$0.in"; "$RESTORE" "$@" <"$0.in" || exit; export XTABLES_LOCKFILE="$0.lock"
					if grep -q -e '`+tt.behind+`' "$0.in" && ! test -e "$0.done"; then touch "$0.done"; `+flush+" -F; "+flush+" -X; fi")
				s := begin(t, k)
				mustRead(t, s, family)
				if err := s.Restore(t.Context(), Payload{family: scripts})[family].Err; !errors.Is(err, nft.ErrStale) {
					t.Errorf("the error is %v", err)
				}
				now := mustRead(t, s, family).Tables
				if filter := now[rules.Filter]; filter.RuleCount() > 0 || filter.Chain("MINE") != nil || filter.Chain(TextChain) != nil {
					t.Errorf("filter is %v", filter.Chains)
				}
				if list := now[rules.Mangle].Rules("MINE"); len(list) > 0 {
					t.Errorf("mangle has %v", labels(list))
				}
			})
		})
	}
}

// Another process makes a table and a chain while canaryd makes the same table to read the bytes of
// texts. Its rules stay, even if the chain of texts cannot be removed. The next write removes it.
func TestATextIsNotWrittenToATableThatAnotherMade(t *testing.T) {
	for name, removal := range map[string]string{"the texts are removed": `exec "$RESTORE" "$@"`, "the texts stay": "exit 1"} {
		t.Run(name, func(t *testing.T) {
			onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
				text := rules.Rule{Spec: "-p tcp -m quota --quota 7 -j ACCEPT", Target: "ACCEPT"}
				other, real := program(Legacy, family, "")+" -t raw ", k.tools[family]
				standInRestore(t, k, family, `if test -e "$0.done"; then `+removal+`; fi; touch "$0.done"
					"$RESTORE" "$@"; export XTABLES_LOCKFILE="$0.lock"; `+other+"-N MINE && "+other+"-A MINE -j DROP")
				s := begin(t, k)
				if now := mustRead(t, s, family).Tables; now[rules.Raw] != nil {
					t.Fatalf("raw is %v", now[rules.Raw].Chains)
				}
				if err := s.Restore(t.Context(), Payload{family: {replayOf(rules.Raw, "MINE", []rules.Rule{text})}})[family].Err; !errors.Is(err, nft.ErrStale) {
					t.Errorf("the error is %v", err)
				}
				if list := mustRead(t, s, family).Tables[rules.Raw].Rules("MINE"); len(list) != 1 || list[0].Target != "DROP" {
					t.Errorf("MINE is %v", labels(list))
				}
				k.tools[family] = real
				mark := Script{Table: rules.Raw, Steps: []Step{{Verb: Append, Chain: "MINE", Rule: rules.Rule{Spec: "-p udp -j ACCEPT", Target: "ACCEPT"}}}}
				if err := s.Restore(t.Context(), Payload{family: {mark}})[family].Err; err != nil {
					t.Error(err)
				}
				if raw := mustRead(t, s, family).Tables[rules.Raw]; len(raw.Rules("MINE")) != 2 || raw.Chain(TextChain) != nil {
					t.Errorf("raw is %v", raw.Chains)
				}
			})
		})
	}
}

// Only iptables-restore can write a text that makes two rules. The result has the reason, which
// names the table.
func TestARefusedLegacyScriptHasAReason(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		hosts := map[rules.Family]string{rules.IPv4: "192.0.2.1,192.0.2.2", rules.IPv6: "2001:db8::1,2001:db8::2"}[family]
		write := func(spec string) Written {
			s := begin(t, k)
			defer s.Close()
			mustRead(t, s, family)
			return s.Restore(t.Context(), Payload{family: {replayOf(rules.Filter, "MINE", []rules.Rule{{Spec: spec, Target: "ACCEPT"}})}})[family]
		}
		if w := write("-p tcp -m quota --quota 7 -j ACCEPT"); w.Err != nil || w.Detour != nil {
			t.Errorf("a text that makes one rule: %v, %v", w.Err, w.Detour)
		}
		w := write("-s " + hosts + " -j ACCEPT")
		if list := mustRead(t, k, family).Tables[rules.Filter].Rules("MINE"); w.Err != nil || len(list) != 2 {
			t.Errorf("a text that makes two rules: %v, MINE is %v", w.Err, labels(list))
		}
		if w.Detour == nil || !strings.Contains(w.Detour.Error(), "table filter: ") {
			t.Errorf("the reason is %v", w.Detour)
		}
	})
}
