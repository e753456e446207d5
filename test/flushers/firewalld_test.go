package flushers

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// python is the packages' folder for Python modules.
const python = "usr/lib/python3/dist-packages"

// firewalldFlushers are firewalld with each of its backends. Either way it empties iptables'
// tables with the iptables of the alternatives, because direct rules are there.
func firewalldFlushers() []flusher {
	var all []flusher
	for _, backend := range []string{"nftables", "iptables"} {
		var daemon *service
		// firewalld inserts direct rules at the top and appends rules of zones, at any time;
		// RFC 3964's are second or third.
		late, numbered := inserts, ""
		if backend == "iptables" {
			late, numbered = anywhere, "RFC3964_IPv4"
		}
		all = append(all, flusher{
			name:     "firewalld, FirewallBackend=" + backend,
			standby:  true,
			unpacked: []string{"usr/sbin/firewalld", python + "/firewall"},
			needs:    []string{"/usr/bin/python3", "/usr/bin/dbus-daemon", "/" + python + "/dbus", "/" + python + "/gi", "/" + python + "/nftables"},
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

// letDown matches an error of iptables-nft and ebtables-nft 1.8.9. If another process commits
// during a deleting restore, they repeat a deletion that succeeded. It was seen three times in
// about 70 reloads on two processors at a load of 12 to 27.
var letDown = regexp.MustCompile(`(CHAIN_DEL|RULE_DELETE) failed \(No such file or directory\)`)

// firewallCmd runs firewall-cmd, and once more after that error.
func firewallCmd(m *machine, what string) {
	m.Helper()
	out, err := m.command("firewall-cmd", what).CombinedOutput()
	if err == nil {
		return
	}
	if !letDown.Match(out) {
		m.Fatalf("firewall-cmd %s: %v\n%s", what, err, out)
	}
	m.Logf("firewall-cmd %s is run again: %s", what, out)
	m.run("firewall-cmd", what)
}

// startFirewalld runs the program of its unit, and returns once firewalld has written its
// rules. After that error it starts again.
func startFirewalld(m *machine) *service {
	m.Helper()
	const failed = 251 // exit code if the rules failed; firewalld runs anyway
	for again := false; ; again = true {
		s := m.launch("firewalld", "--nofork", "--nopid", "--log-target=console")
		state := m.until(s, "sh", "-c", fmt.Sprintf("firewall-cmd --state || [ $? -eq %d ]", failed))
		if !strings.Contains(state, "failed") {
			return s
		}
		m.stop(s)
		if again || !letDown.Match(s.out.Bytes()) {
			m.Fatalf("firewalld failed:\n%s", &s.out)
		}
		m.Logf("firewalld is started again:\n%s", &s.out)
	}
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
