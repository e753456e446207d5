package versions

import "testing"

func TestCompare(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"1.8.7", "1.8.7", 0}, {"1.8.7", "1.8.10", -1}, {"1.8.13", "1.8.9", 1}, {"1.9", "1.8.9", 1}, {"1.8", "1.8.1", -1}} {
		if got := compare(c.a, c.b); got != c.want {
			t.Errorf("%s and %s compare as %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

func TestNumber(t *testing.T) {
	for text, want := range map[string]string{
		"iptables v1.8.7 (nf_tables)\n":              "1.8.7",
		"nftables v1.1.3 (Commodore Bullmoose #4)\n": "1.1.3",
		"ipset v7.22, protocol version: 7\n":         "7.22",
		"none":                                       "",
	} {
		if got := Number(text); got != want {
			t.Errorf("%q names %q, want %q", text, got, want)
		}
	}
}
