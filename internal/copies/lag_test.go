package copies

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLag: a copy falls behind with the first change that it lacks, and stays behind after
// further changes until it equals the generation.
func TestLag(t *testing.T) {
	section := func(chain string) rules.Section { return rules.Section{Chains: []rules.Chain{{Name: chain}}} }
	has, start := section("KUBE-A"), time.Unix(1e9, 0)
	l := CurrentIn(1)
	for _, step := range []struct {
		what    string
		want    rules.Section
		edition int
		changed time.Duration // the time of the generation's last change
		now     time.Duration
		behind  bool
	}{
		{"nothing has changed", has, 1, 0, time.Hour, false},
		{"a chain is new", section("KUBE-B"), 2, time.Hour, time.Hour + Most - 1, false},
		{"another one is", section("KUBE-C"), 3, time.Hour + Most - 1, time.Hour + Most - 1, false},
		{"it lasts", section("KUBE-C"), 3, time.Hour + Most - 1, time.Hour + Most, true},
		{"the owner went back", has, 4, 2 * time.Hour, 3 * time.Hour, false},
		{"and forth", section("KUBE-B"), 5, 3 * time.Hour, 3*time.Hour + 1, false},
	} {
		if got := l.TooLong(has, step.want, step.edition, start.Add(step.changed), start.Add(step.now)); got != step.behind {
			t.Errorf("%s: behind for too long: %t, want %t", step.what, got, step.behind)
		}
	}
	if n := OtherChains(section("KUBE-A"), section("KUBE-B")); n != 2 {
		t.Errorf("%d chains differ, want 2", n)
	}
}
