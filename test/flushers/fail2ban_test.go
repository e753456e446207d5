package flushers

import "os"

// fail2banFlushers are fail2ban with iptables-multiport and a jail whose log stays
// empty. It adds and removes one chain and one jump; to take that for a
// flush replays for nothing.
func fail2banFlushers() []flusher {
	var server *service
	start := func(m *machine) {
		server = m.launch("fail2ban-server", "-xf", "start")
		m.until(server, "fail2ban-client", "ping")
	}
	ban := func(m *machine) {
		m.run("fail2ban-client", "set", "door", "banip", "192.0.2.66", "2001:db8::66")
		m.until(server, "sh", "-c", "iptables -w -S f2b-door | grep 192.0.2.66 && ip6tables -w -S f2b-door | grep 2001:db8::66")
	}
	return []flusher{{
		name:     "fail2ban",
		unpacked: []string{"usr/bin/fail2ban-server"},
		needs:    []string{"/usr/bin/python3"},
		install: func(m *machine) {
			m.Must(os.MkdirAll("/run/fail2ban", 0o755))
			m.write("/run/door.log", "")
			m.write("/etc/fail2ban/fail2ban.local", "[Definition]\nlogtarget = STDERR\ndbfile = None\n")
			m.write("/etc/fail2ban/jail.d/defaults-debian.conf", `[DEFAULT]
banaction = iptables-multiport
backend = polling

[door]
enabled = true
filter = sshd
port = 22,2222
logpath = /run/door.log
`)
		},
		steps: []step{
			{name: "`systemctl start fail2ban`, and a ban", does: func(m *machine) { start(m); ban(m) }},
			{name: "`fail2ban-client reload`", does: func(m *machine) { m.run("fail2ban-client", "reload") }},
			{name: "`systemctl stop fail2ban`", does: func(m *machine) { m.run("fail2ban-client", "stop"); m.gone(server) }},
		},
	}}
}
