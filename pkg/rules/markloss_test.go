package rules

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMarksOfALostRule(t *testing.T) {
	for _, test := range []struct {
		spec string
		want MarkLoss
	}{
		{"-j MARK --set-xmark 0x8000/0x8000", MarkLoss{Unset: 0x8000}},
		{"-j MARK --or-mark 0x8000", MarkLoss{Unset: 0x8000}},
		{"-j MARK --set-xmark 0x0/0xf0000", MarkLoss{Uncleared: 0xf0000}},
		{"-j MARK --set-xmark 0x4000/0x0", MarkLoss{Unset: 0x4000, Uncleared: 0x4000}},
		{"-i tailscale0 -j MARK --set-xmark 0x40000/0xff0000", MarkLoss{Unset: 0x40000, Uncleared: 0xfb0000}},
		{"-j MARK --set-mark 0x1", MarkLoss{Unset: 1, Uncleared: math.MaxUint32 - 1}},
		{"-j CONNMARK --set-xmark 0x80/0x80", MarkLoss{Unset: 0x80}},
		{"-j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80", MarkLoss{0x80, 0x80}},
		{"-j CONNMARK --save-mark --nfmask 0xf --ctmask 0xf0", MarkLoss{0xff, 0xff}},
		{"-j CONNMARK --restore-mark --mask 0x80", MarkLoss{0x80, 0x80}},
		{"-j CONNMARK --save-mark", AnyMark},
		{"-j CONNMARK --restore-mark --left-shift-mark 1 --nfmask 0x80 --ctmask 0x80", AnyMark},
		{"-p tcp -j HMARK --hmark-tuple src --hmark-mod 2 --hmark-offset 1 --hmark-rnd 1", AnyMark},
		{"-j SET --map-set s src --map-mark", AnyMark},
		{"-m socket --restore-skmark -j KUBE-A", AnyMark},
		{"-m mark --mark 0x1 -j ACCEPT", MarkLoss{}},
		{`-m comment --comment "MARK --set-xmark 0x1/0x1" -j DROP`, MarkLoss{}},
		{"-j KUBE-MARK-MASQ", MarkLoss{}},
		{OpaqueRule([]byte("x"), "MARK", "a test").Spec, AnyMark},
	} {
		r, err := ParseRule(test.spec)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(test.want, r.MarkLoss()); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.spec, d)
		}
	}
}

func TestWhatRulesMatchWhereMarksAreLost(t *testing.T) {
	masquerade, cleared := MarkLoss{Unset: 0x4000}, MarkLoss{Uncleared: 0x4000}
	for _, test := range []struct {
		loss MarkLoss
		spec string
		want string
	}{
		{masquerade, "-m mark --mark 0x4000/0x4000 -j ACCEPT", "less"},
		{masquerade, "-m mark ! --mark 0x4000/0x4000 -j RETURN", "more"},
		{cleared, "-m mark --mark 0x4000/0x4000 -j ACCEPT", "more"},
		{cleared, "-m mark ! --mark 0x4000/0x4000 -j RETURN", "less"},
		{masquerade, "-m mark --mark 0x0/0x4000 -j ACCEPT", "more"},
		{masquerade, "-m mark --mark 0x1 -j ACCEPT", "more"}, // with 0x4000 it does not match
		{masquerade, "-m mark --mark 0x4001 -j ACCEPT", "less"},
		{masquerade, "-m mark --mark 0x8000/0x8000 -j DROP", ""},
		{masquerade, "-m mark --mark 0x4000/0x8000 -j DROP", ""}, // no mark equals it
		{masquerade, "-m connmark --mark 0x4000/0x4000 -j DROP", "less"},
		{masquerade, "-m mark --mark 0x4000/0x4000 -m connmark ! --mark 0x4000/0x4000 -j DROP", "less more"},
		{masquerade, "-p tcp -j MARK --set-xmark 0x4000/0x4000", ""},
		{masquerade, `-m comment --comment "-m mark --mark 0x4000/0x4000" -j DROP`, ""},
		{masquerade, "-m rpfilter --validmark -j DROP", "less more"},
		{masquerade, `-m bpf --bytecode "1,6 0 0 65535" -j DROP`, "less more"},
		{masquerade, "-m ndpi --mark 0x4000 -j DROP", "less more"},
		{masquerade, "-s 10.0.0.0/8 -j DROP", ""},
		{masquerade, OpaqueRule([]byte("x"), "DROP", "a test").Spec, "less more"},
		{MarkLoss{}, OpaqueRule([]byte("x"), "DROP", "a test").Spec, ""},
	} {
		r, err := ParseRule(test.spec)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		less, more := test.loss.Misleads(r)
		if less {
			got = "less"
		}
		if more && less {
			got += " "
		}
		if more {
			got += "more"
		}
		if got != test.want {
			t.Errorf("%+v: %s matches %q, want %q", test.loss, test.spec, got, test.want)
		}
	}
}
