package rules

import "testing"

func TestGoto(t *testing.T) {
	for name, c := range map[string]struct {
		rule Rule
		want bool
	}{
		"-j":                        {Rule{Spec: "-p tcp -j KUBE-FORWARD", Target: "KUBE-FORWARD"}, false},
		"-g":                        {Rule{Spec: "-p tcp -g KUBE-FORWARD", Target: "KUBE-FORWARD"}, true},
		"-g alone":                  {Rule{Spec: "-g KUBE-FORWARD", Target: "KUBE-FORWARD"}, true},
		"no target":                 {Rule{Spec: "-p tcp"}, false},
		"a label with -j":           {OpaqueBytes([]byte("x"), nil, "KUBE-FORWARD", Decoded("[bpf 01234567] -j KUBE-FORWARD", true)), false},
		"a label of -j alone":       {OpaqueBytes([]byte("x"), nil, "KUBE-FORWARD", Decoded("-j KUBE-FORWARD", true)), false},
		"a label with -g":           {OpaqueBytes([]byte("x"), nil, "KUBE-FORWARD", Decoded("[bpf 01234567] -g KUBE-FORWARD", true)), true},
		"a label without a verdict": {OpaqueBytes([]byte("x"), nil, "KUBE-FORWARD", Decoded("[immediate 01234567]", true)), true},
		"no label":                  {OpaqueBytes([]byte("x"), nil, "KUBE-FORWARD", "its comment holds a line break"), true},
		"opaque, no target":         {OpaqueBytes([]byte("x"), nil, "", Decoded("[bpf 01234567]", false)), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.rule.Goto(); got != c.want {
				t.Errorf("Goto of %q is %t", c.rule.Label(), got)
			}
		})
	}
}
