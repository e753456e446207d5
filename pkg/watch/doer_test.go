package watch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWhoDecidedOnAWrite: a command of iptables does what the process wants that executed it, also
// by way of sudo or a shell for one command. All commands of a script have the same doer.
func TestWhoDecidedOnAWrite(t *testing.T) {
	for _, tt := range []struct {
		name string
		line [][2]string // comm and command line, the writer first; the last one's parent is PID 1
		want string      // the doer's comm
	}{
		{"a program of its own", [][2]string{{"netavark", "netavark setup"}, {"podman", "podman run"}}, "netavark"},
		{"Puppet", [][2]string{{"iptables", "/usr/sbin/iptables -t nat -D KUBE-SERVICES"}, {"puppet", "/usr/bin/ruby puppet agent"}}, "puppet"},
		{"a shell for one command", [][2]string{{"iptables", "iptables -F"}, {"sh", "sh -c /sbin/iptables -F"}, {"ruby", "ruby chef-client"}}, "ruby"},
		{"a script", [][2]string{{"ip6tables", "ip6tables -D INPUT 1"}, {"sudo", "sudo ip6tables -D INPUT 1"}, {"bash", "bash purge.sh"}, {"sshd", "sshd"}}, "bash"},
		{"a script in one line", [][2]string{{"iptables", "iptables -F"}, {"sh", "sh -c iptables -F; iptables -X"}, {"cron", "cron"}}, "sh"},
		{"kube-proxy", [][2]string{{"iptables-restor", "iptables-restore -w"}, {"kube-proxy", "kube-proxy"}}, "kube-proxy"},
		{"a unit", [][2]string{{"nft", "nft -f /etc/nftables.conf"}}, "nft"},
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
			if by.Comm != tt.want || !by.Known() {
				t.Errorf("%+v, want %s", by, tt.want)
			}
			if writer, _ := processWriter(proc, 100); !writer.Doer().Is(by) {
				t.Errorf("the writer's doer is %+v, want %+v", writer.Doer(), by)
			}
		})
	}
}

// TestKinOfADoer: an agent's tasks are processes of their own below one connection, and a purge is
// one of them or all. What sshd, cron or containerd started in another session is no kin.
func TestKinOfADoer(t *testing.T) {
	proc := t.TempDir()
	for _, p := range []struct {
		pid, parent int
		line        string
	}{
		{10, 1, "sshd"}, {11, 10, "sshd"}, {12, 11, "sh"}, {13, 12, "python3"}, {14, 13, "iptables"},
		{22, 11, "sh"}, {23, 22, "python3"}, {24, 23, "iptables"},
		{31, 10, "sshd"}, {32, 31, "bash"}, {34, 32, "iptables"},
		{40, 1, "containerd"}, {43, 40, "portmap"}, {44, 43, "iptables"}, {53, 40, "portmap"}, {54, 53, "iptables"},
	} {
		addProcess(t, proc, p.pid, p.line, p.parent, uint64(1000+p.pid))
	}
	for _, tt := range []struct {
		a, b uint32
		want bool
	}{{14, 14, true}, {14, 24, true}, {24, 14, true}, {14, 34, false}, {44, 54, false}, {44, 34, false}} {
		if got := readProcess(proc, tt.a).by.Kin(readProcess(proc, tt.b).by); got != tt.want {
			t.Errorf("%d and %d are kin: %t, want %t", tt.a, tt.b, got, tt.want)
		}
	}
}

// TestWhichProgramWrote: the kernel keeps 15 bytes of a name.
func TestWhichProgramWrote(t *testing.T) {
	for _, tt := range []struct {
		comm, command string
		want          Program
	}{
		{"iptables", "", OneRule},
		{"ip6tables-nft", "", OneRule},
		{"iptables-restor", "", Restore},
		{"ip6tables-resto", "", Restore},
		{"iptables-nft-re", "", Restore},
		{"ip6tables-nft-r", "", Restore},
		{"iptables-legacy", "", ""},
		{"ip6tables-legac", "", ""},
		{"iptables-legacy", "/usr/sbin/iptables-legacy -D INPUT 1", OneRule},
		{"ip6tables-legac", "ip6tables-legacy-restore --noflush", Restore},
		{"netavark", "netavark setup", "netavark"},
		{"", "", ""},
	} {
		if got := (Writer{Comm: tt.comm, Command: tt.command}).Doer().Program; got != tt.want {
			t.Errorf("%s (%s) is %q, want %q", tt.comm, tt.command, got, tt.want)
		}
	}
}
