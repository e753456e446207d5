package watch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWhoDecidedOnAWrite: iptables carries out the decision of its caller, also
// through sudo or a shell for one command. All commands of a script have the same
// doer. PID 1's caller is unknown.
func TestWhoDecidedOnAWrite(t *testing.T) {
	for _, tt := range []struct {
		name string
		line [][2]string // comm and command line, the writer first; the last's parent is PID 1
		want string      // the doer's comm
	}{
		{"a program of its own", [][2]string{{"netavark", "netavark setup"}, {"podman", "podman run"}}, "netavark"},
		{"Puppet", [][2]string{{"iptables", "/usr/sbin/iptables -t nat -D KUBE-SERVICES"}, {"puppet", "/usr/bin/ruby puppet agent"}}, "puppet"},
		{"a shell for one command", [][2]string{{"iptables", "iptables -F"}, {"sh", "sh -c /sbin/iptables -F"}, {"ruby", "ruby chef-client"}}, "ruby"},
		{"a script", [][2]string{{"ip6tables", "ip6tables -D INPUT 1"}, {"sudo", "sudo ip6tables -D INPUT 1"}, {"bash", "bash purge.sh"}, {"sshd", "sshd"}}, "bash"},
		{"a script in one line", [][2]string{{"iptables", "iptables -F"}, {"sh", "sh -c iptables -F; iptables -X"}, {"cron", "cron"}}, "sh"},
		{"kube-proxy", [][2]string{{"iptables-restor", "iptables-restore -w"}, {"kube-proxy", "kube-proxy"}}, "kube-proxy"},
		{"a unit", [][2]string{{"nft", "nft -f /etc/nftables.conf"}}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			proc := t.TempDir()
			for i, p := range tt.line {
				parent := 1
				if i+1 < len(tt.line) {
					parent = 100 - i - 1
				}
				addProcess(t, proc, 100-i, p[0], parent, uint64(1000-i))
				command := strings.ReplaceAll(p[1], " ", "\x00")
				if err := os.WriteFile(filepath.Join(proc, fmt.Sprint(100-i), "cmdline"), []byte(command), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			by := readProcess(proc, 100).by
			if by.Known() != (tt.want != "") || by.Known() && by.Comm != tt.want {
				t.Errorf("%+v, want %q", by, tt.want)
			}
			if !by.Known() {
				return
			}
			if writer, _ := processWriter(proc, 100); !writer.Doer().Is(by) {
				t.Errorf("the writer's doer is %+v, want %+v", writer.Doer(), by)
			}
		})
	}
}

// TestOneJob: an agent and a script have one job. A purge cannot be the one job
// of a person's shell, a daemon that starts others' jobs, an owner of rules, or
// an unread process.
func TestOneJob(t *testing.T) {
	for _, tt := range []struct {
		comm, command     string
		session, terminal int
		want              bool
	}{
		{"puppet", "/usr/bin/ruby puppet agent", 1, 0, true},
		{"bash", "bash /root/purge.sh", 1, 34816, true},
		{"bash", "bash -c iptables -F; iptables -X", 1, 0, true},
		{"purge.sh", "/bin/sh ./purge.sh", 1, 34816, true},
		{"python3", "/usr/bin/python3 -", 1, 0, true},
		{"bash", "-bash", 60, 34816, false},
		{"bash", "bash", 1, 34816, false},
		{"bash", "/bin/bash --norc -i", 1, 0, false},
		{"sh", "sh", 1, 0, false},
		{"busybox", "busybox sh", 1, 0, false},
		{"python3", "python3", 60, 34816, false},
		{"python3", "python3 agent.py", 60, 0, true},
		{"sshd-session", "sshd-session: root", 1, 0, false},
		{"systemd", "/lib/systemd/systemd --user", 1, 0, false},
		{"cron", "/usr/sbin/CRON", 1, 0, false},
		{"containerd-shim", "containerd-shim-runc-v2 -id 1", 1, 0, false},
		{"kubelet", "kubelet", 1, 0, false},
		{"kube-proxy", "kube-proxy --cleanup", 1, 0, false},
		{"dockerd", "dockerd", 1, 0, false},
		{"portmap", "portmap", 1, 0, false},
		{"firewall.sh", "/bin/sh firewall.sh", 1, 0, true},
	} {
		t.Run(tt.comm+" "+tt.command, func(t *testing.T) {
			proc := t.TempDir()
			addProcess(t, proc, 50, "iptables", 60, 2000)
			addProcess(t, proc, 60, tt.comm, 70, 1000)
			addProcess(t, proc, 70, "other", 1, 500)
			stat := fmt.Sprintf("60 (%s) S 70 60 %d %d -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 1000 1000 1\n", tt.comm, tt.session, tt.terminal)
			for file, text := range map[string]string{"stat": stat, "cmdline": strings.ReplaceAll(tt.command, " ", "\x00")} {
				if err := os.WriteFile(filepath.Join(proc, "60", file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			by := readProcess(proc, 50).by
			if by.PID != 60 || by.OneJob() != tt.want {
				t.Errorf("%+v has one job: %t, want %t", by, by.OneJob(), tt.want)
			}
			if by.Start = 0; by.OneJob() || by.Is(by) {
				t.Error("a process that was gone has one job, or is known to be the same")
			}
		})
	}
}

// TestCommands: a shell, a script and an agent execute commands of others. An
// owner of rules does not, even as a script.
func TestCommands(t *testing.T) {
	for _, tt := range []struct {
		comm, command string
		want          bool
	}{
		{"bash", "-bash", true},
		{"sh", "sh -c nft flush ruleset; true", true},
		{"purge.sh", "/bin/sh ./purge.sh", true},
		{"python3", "/usr/bin/python3 agent.py", true},
		{"puppet", "/usr/bin/ruby puppet agent", true},
		{"kube-proxy", "/bin/sh /usr/local/bin/kube-proxy", false},
		{"kubelite", "/snap/microk8s/kubelite", false},
		{"dockerd", "/usr/bin/dockerd", false},
		{"systemd", "/sbin/init", false},
	} {
		d := Doer{PID: 7, Start: 1, Comm: tt.comm, Command: tt.command}
		if got := d.Commands(); got != tt.want {
			t.Errorf("%s (%s): %t, want %t", tt.comm, tt.command, got, tt.want)
		}
		if d.Start = 0; d.Commands() {
			t.Errorf("%s, which was not read: it is known", tt.comm)
		}
	}
}
