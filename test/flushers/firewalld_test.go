//go:build flushers

package flushers

import (
	"os"
	"strings"
)

// firewalldFlushers are firewalld with each of its backends. Whichever it has, it empties
// iptables' tables through the iptables that the alternatives name, because
// direct rules live there.
func firewalldFlushers() []flusher {
	var all []flusher
	for _, backend := range []string{"nftables", "iptables"} {
		var daemon *service
		// Direct rules are inserted on top, rules of zones appended, whenever
		// firewalld gets there; RFC 3964's come second or third.
		late, numbered := inserts, ""
		if backend == "iptables" {
			late, numbered = anywhere, "RFC3964_IPv4"
		}
		all = append(all, flusher{
			name: "firewalld, FirewallBackend=" + backend,
			install: func(m *machine) {
				configureFirewalld(m, backend)
				bus := m.launch("dbus-daemon", "--config-file=/run/dbus.conf", "--nofork", "--nopidfile")
				m.until(bus, "test", "-S", "/run/dbus/system_bus_socket")
				daemon = startFirewalld(m)
			},
			steps: []step{
				{
					name:  "`firewall-cmd --reload`",
					does:  func(m *machine) { firewallCmd(m, "--reload") },
					loses: both, late: late, numbered: numbered,
				},
				{
					name:  "`firewall-cmd --complete-reload`",
					does:  func(m *machine) { firewallCmd(m, "--complete-reload") },
					loses: both, late: late, numbered: numbered,
				},
				{
					name:  "`systemctl stop firewalld`",
					does:  func(m *machine) { m.stop(daemon) },
					loses: both, late: late, numbered: numbered,
				},
				{
					name:  "`systemctl start firewalld`",
					does:  func(m *machine) { daemon = startFirewalld(m) },
					loses: both, late: late, numbered: numbered,
				},
			},
		})
	}
	return all
}

// firewallCmd runs firewall-cmd, and once more if iptables-nft 1.8.9 let firewalld down: where
// somebody else commits while a restore with -X is at work, it tries again to
// delete the chains that it has deleted. Seen twice in about 50 reloads on two
// processors at a load of 12 to 27.
func firewallCmd(m *machine, what string) {
	m.Helper()
	out, err := m.command("firewall-cmd", what).CombinedOutput()
	if err == nil {
		return
	}
	if !strings.Contains(string(out), "CHAIN_DEL failed (No such file or directory)") {
		m.Fatalf("firewall-cmd %s: %v\n%s", what, err, out)
	}
	m.Logf("firewall-cmd %s is run again: %s", what, out)
	m.run("firewall-cmd", what)
}

// startFirewalld runs what its unit runs and returns when it has written its
// rules.
func startFirewalld(m *machine) *service {
	m.Helper()
	s := m.launch("firewalld", "--nofork", "--nopid")
	m.until(s, "firewall-cmd", "--state")
	return s
}

// configureFirewalld writes its backend, a zone, and direct rules.
func configureFirewalld(m *machine, backend string) {
	m.Helper()
	m.write("/run/dbus.conf", `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
  </policy>
</busconfig>
`)
	m.Must(os.MkdirAll("/run/dbus", 0o755))
	m.edit("/etc/firewalld/firewalld.conf", "\nFirewallBackend=nftables\n", "\nFirewallBackend="+backend+"\n")
	m.write("/etc/firewalld/zones/public.xml", `<?xml version="1.0" encoding="utf-8"?>
<zone>
  <interface name="eth0"/>
  <service name="ssh"/>
  <port port="10250" protocol="tcp"/>
  <masquerade/>
</zone>
`)
	m.write("/etc/firewalld/direct.xml", `<?xml version="1.0" encoding="utf-8"?>
<direct>
  <chain ipv="ipv4" table="filter" chain="office"/>
  <rule ipv="ipv4" table="filter" chain="INPUT" priority="0">-s 198.51.100.0/24 -j office</rule>
  <rule ipv="ipv4" table="filter" chain="office" priority="0">-p tcp --dport 9100 -j ACCEPT</rule>
  <rule ipv="ipv6" table="filter" chain="FORWARD" priority="0">-d 2001:db8:100::/48 -j ACCEPT</rule>
  <rule ipv="ipv4" table="nat" chain="POSTROUTING" priority="0">-s 192.168.122.0/24 -o eth0 -j MASQUERADE</rule>
</direct>
`)
}
