//go:build flushers

package flushers

import (
	"os"
	"regexp"
)

// shorewallFlushers are shorewall with one interface. It compiles its rules and writes
// whole tables by iptables-restore, after it has tried out what iptables can.
func shorewallFlushers() []flusher {
	shorewall := func(what string) func(m *machine) {
		return func(m *machine) { m.run("shorewall", what) }
	}
	// A chain's name is the digest of the compiled script, its date included.
	digest := regexp.MustCompile(`(sha-[lr]h-)[0-9a-f]+`)
	return []flusher{{
		name: "shorewall",
		install: func(m *machine) {
			m.Must(os.MkdirAll("/var/lib/shorewall", 0o755))
			_ = m.command("ip", "link", "delete", "eth0").Run() // there is none the first time
			m.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "outside")
			m.run("ip", "address", "replace", "192.0.2.1/24", "dev", "eth0")
			m.run("ip", "link", "set", "eth0", "up")
			for file, text := range map[string]string{
				"zones":      "fw firewall\nnet ipv4\n",
				"interfaces": "?FORMAT 2\nnet eth0 optional\n",
				"policy":     "$FW net ACCEPT\nnet all DROP\nall all REJECT\n",
				"rules":      "?SECTION NEW\nACCEPT net $FW tcp 22,10250\n",
				"snat":       "MASQUERADE 192.168.122.0/24 eth0\n",
			} {
				m.write("/etc/shorewall/"+file, text)
			}
			m.run("shorewall", "start")
		},
		steps: []step{
			{name: "`shorewall restart`", does: shorewall("restart"), loses: both, random: digest},
			{name: "`shorewall stop`", does: shorewall("stop"), loses: both, random: digest},
			{name: "`shorewall clear`", does: shorewall("clear"), loses: both, random: digest},
		},
	}}
}
