package culprit

import "testing"

// TestOnlyReads: a command that takes the lock only to look changes nothing.
func TestOnlyReads(t *testing.T) {
	for command, want := range map[string]bool{
		"": false, "iptables -t nat -F": false, "iptables-restore -w 5": false, "sh -c iptables -S": false, "nft -S": false,
		"/sbin/ip6tables-legacy -C INPUT -j ACCEPT": true, "iptables-legacy-save -t nat": true, "iptables-save": true, "iptables --list": true,
	} {
		if got := onlyReads(command); got != want {
			t.Errorf("%q only reads: %t, want %t", command, got, want)
		}
	}
}
