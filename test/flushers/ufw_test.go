package flushers

import (
	"os"
	"path/filepath"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// ufwFlushers are ufw with its defaults, which empties only its own chains, and ufw that
// manages the built-in chains. Its configuration warns of the latter.
func ufwFlushers() []flusher {
	return []flusher{
		ufw("ufw", "no", nil),
		ufw("ufw, MANAGE_BUILTINS=yes, with "+oneFlush[0], "yes", both),
	}
}

func ufw(name, manageBuiltins string, loses []iptables.Backend) flusher {
	late, flags := inTime, []string(nil)
	if loses != nil {
		late, flags = appends, oneFlush
	}
	return flusher{
		name:     name,
		unpacked: []string{"usr/sbin/ufw"},
		needs:    []string{"/usr/bin/python3"},
		flags:    flags,
		install: func(m *machine) {
			// The installation of the package does the same.
			for _, file := range []string{"before.rules", "before6.rules", "after.rules", "after6.rules", "user.rules", "user6.rules"} {
				text, err := os.ReadFile(filepath.Join("/usr/share/ufw/iptables", file))
				m.Must(err)
				m.write(filepath.Join("/etc/ufw", file), string(text))
			}
			text, err := os.ReadFile("/usr/share/ufw/ufw.conf")
			m.Must(err)
			m.write("/etc/ufw/ufw.conf", string(text))

			m.edit("/etc/default/ufw", "\nMANAGE_BUILTINS=no\n", "\nMANAGE_BUILTINS="+manageBuiltins+"\n")
			m.run("ufw", "allow", "22/tcp")
			m.run("ufw", "allow", "from", "198.51.100.0/24", "to", "any", "port", "9100", "proto", "tcp")
		},
		steps: []step{
			{name: "`ufw enable`", does: func(m *machine) { m.run("ufw", "--force", "enable") }, loses: loses, late: late},
			{name: "`ufw reload`", does: func(m *machine) { m.run("ufw", "reload") }, loses: loses, late: late},
			{name: "`ufw disable`", does: func(m *machine) { m.run("ufw", "disable") }, loses: loses, late: late},
		},
	}
}
