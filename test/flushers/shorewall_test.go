package flushers

import (
	"os"
	"regexp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// shorewallFlushers are shorewall and shorewall6, with one interface. They test iptables'
// features, compile their rules, and write whole tables by iptables-restore. Each leaves the
// other's family alone.
func shorewallFlushers() []flusher {
	return []flusher{
		shorewall("shorewall", rules.IPv4, "ipv4", "192.0.2.1/24", "192.168.122.0/24"),
		shorewall("shorewall6", rules.IPv6, "ipv6", "2001:db8::1/64", "2001:db8:122::/64"),
	}
}

func shorewall(program string, family rules.Family, zone, address, behind string) flusher {
	does := func(what string) step {
		return step{
			name:  "`" + program + " " + what + "`",
			does:  func(m *machine) { m.run(program, what) },
			loses: both, of: []rules.Family{family},
			// A chain's name is the digest of the compiled script, its date included.
			random: regexp.MustCompile(`(sha-[lr]h-)[0-9a-f]+`),
		}
	}
	return flusher{
		name:     program,
		unpacked: []string{"usr/sbin/" + program, "usr/share/shorewall/lib.core", "usr/share/shorewall/compiler.pl"},
		needs:    []string{"/usr/bin/perl", "/usr/bin/bc"},
		install: func(m *machine) {
			m.Must(os.MkdirAll("/var/lib/"+program, 0o755))
			_ = m.command("ip", "link", "delete", "eth0").Run() // there is none at first
			m.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "outside")
			m.run("ip", "address", "replace", address, "dev", "eth0")
			m.run("ip", "link", "set", "eth0", "up")
			for file, text := range map[string]string{
				"zones":      "fw firewall\nnet " + zone + "\n",
				"interfaces": "?FORMAT 2\nnet eth0 optional\n",
				"policy":     "$FW net ACCEPT\nnet all DROP\nall all REJECT\n",
				"rules":      "?SECTION NEW\nACCEPT net $FW tcp 22,10250\n",
				"snat":       "MASQUERADE " + behind + " eth0\n",
			} {
				m.write("/etc/"+program+"/"+file, text)
			}
			m.run(program, "start")
		},
		steps: []step{does("restart"), does("stop"), does("clear")},
	}
}
