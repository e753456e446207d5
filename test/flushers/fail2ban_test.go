package flushers

import (
	"fmt"
	"os"
)

// fail2banFiles are the files of fail2ban that hack/install-deps.sh unpacks.
var fail2banFiles = []string{"usr/bin/fail2ban-server"}

// A fail2ban is fail2ban with iptables-multiport and a jail whose log stays empty.
type fail2ban struct{ server *service }

func (*fail2ban) install(m *machine) {
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
}

func (f *fail2ban) start(m *machine) {
	f.server = m.launch("fail2ban-server", "-xf", "start")
	m.until(f.server, "fail2ban-client", "ping")
}

// ban bans the host of that number in both families.
func (f *fail2ban) ban(m *machine, host int) {
	v4, v6 := fmt.Sprintf("192.0.2.%d", host), fmt.Sprintf("2001:db8::%d", host)
	m.run("fail2ban-client", "set", "door", "banip", v4, v6)
	m.until(f.server, "sh", "-c", "iptables -w -S f2b-door | grep -w "+v4+" && ip6tables -w -S f2b-door | grep -w "+v6)
}

func (f *fail2ban) stop(m *machine) {
	m.run("fail2ban-client", "stop")
	m.gone(f.server)
}

// fail2banFlushers: fail2ban adds and removes one chain and one jump. If canaryd took that for
// a flush, it would replay for nothing.
func fail2banFlushers() []flusher {
	var f fail2ban
	return []flusher{{
		name:     "fail2ban",
		unpacked: fail2banFiles,
		needs:    []string{"/usr/bin/python3"},
		install:  f.install,
		steps: []step{
			{name: "`systemctl start fail2ban`, and a ban", does: func(m *machine) { f.start(m); f.ban(m, 66) }},
			{name: "`fail2ban-client reload`", does: func(m *machine) { m.run("fail2ban-client", "reload") }},
			{name: "`systemctl stop fail2ban`", does: f.stop},
		},
	}}
}
