package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTrouble: in each case canaryd prints one line with the remedy, and exits
// with 2.
func TestTrouble(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		backend iptables.Backend
		// prepare makes the trouble and returns the words before the command
		// line.
		prepare func(n *nodetest.Node) []string
		flags   []string
		want    []string
	}{
		{
			name: "a file in the place of the state folder", backend: iptables.NFT,
			prepare: func(n *nodetest.Node) []string { n.Must(os.WriteFile("/run/file", nil, 0o600)); return nil },
			flags:   []string{"--state-dir=/run/file"},
			want:    []string{"state folder /run/file", "not a directory", "--state-dir"},
		},
		{
			name: "a state folder that others may write to", backend: iptables.NFT,
			prepare: func(n *nodetest.Node) []string {
				n.Must(os.MkdirAll("/run/open", 0o700))
				n.Must(os.Chmod("/run/open", 0o777))
				return nil
			},
			flags: []string{"--state-dir=/run/open"},
			want:  []string{"other users may write to /run/open", "chmod go-w", "--state-dir"},
		},
		{
			name: "a read-only state folder of another user", backend: iptables.Legacy,
			prepare: func(n *nodetest.Node) []string {
				n.Must(os.MkdirAll("/run/ro/generations", 0o700))
				n.Must(os.Chown("/run/ro", 1, 1))
				n.Must(unix.Mount("/run/ro", "/run/ro", "", unix.MS_BIND, ""))
				n.Must(unix.Mount("", "/run/ro", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""))
				return nil
			},
			flags: []string{"--state-dir=/run/ro"},
			want:  []string{"/run/ro belongs to user 1", "chown root", "--state-dir"},
		},
		{
			name: "no programs for a replay by text, nft", backend: iptables.NFT, prepare: hidePrograms,
			flags: []string{"--replay=text"},
			want:  []string{"iptables-nft is not installed", `install the package "iptables"`},
		},
		{
			name: "no programs, legacy", backend: iptables.Legacy, prepare: hidePrograms,
			want: []string{"iptables-legacy is not installed", `install the package "iptables"`},
		},
		{
			name: "no CAP_NET_ADMIN, nft", backend: iptables.NFT, prepare: dropNetAdmin,
			want: []string{"CAP_NET_ADMIN is needed"},
		},
		{
			name: "no CAP_NET_ADMIN, legacy", backend: iptables.Legacy, prepare: dropNetAdmin,
			want: []string{"CAP_NET_ADMIN is needed"},
		},
		{
			name: "another daemon", backend: iptables.NFT,
			prepare: func(n *nodetest.Node) []string { n.Load(); n.Start(); return nil },
			flags:   []string{"--socket=/run/other.sock", "--metrics-bind-address="},
			want:    []string{"another canaryd runs in this network namespace", "process "},
		},
		{
			name: "somebody at the socket", backend: iptables.NFT,
			prepare: func(n *nodetest.Node) []string {
				l, err := net.Listen("unix", "/run/taken.sock")
				n.Must(err)
				n.Cleanup(func() { l.Close() })
				return nil
			},
			flags: []string{"--socket=/run/taken.sock"},
			want:  []string{"/run/taken.sock", "another canaryd", "--socket"},
		},
		{
			name: "a file in the place of the socket", backend: iptables.NFT,
			prepare: func(n *nodetest.Node) []string { n.Must(os.WriteFile("/run/file", nil, 0o600)); return nil },
			flags:   []string{"--socket=/run/file"},
			want:    []string{"/run/file is in the way", "--socket"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			nodetest.On(t, test.backend, func(n *nodetest.Node) {
				words := append(test.prepare(n), append([]string{nodetest.Canaryd()}, n.Flags("run")...)...)
				words = append(words, test.flags...)
				cmd := exec.CommandContext(n.Context(), words[0], words[1:]...)
				code, stdout, stderr := n.Exec(cmd)
				if code != 2 || stdout != "" {
					n.Errorf("exit code %d, stdout %q; want 2 and nothing\n%s", code, stdout, stderr)
				}
				n.OneLine(stderr)
				for _, word := range test.want {
					if !strings.Contains(stderr, word) {
						n.Errorf("want %q in %q", word, stderr)
					}
				}
			})
		})
	}
}

// hidePrograms removes the administrators' programs from this mount namespace.
func hidePrograms(n *nodetest.Node) []string {
	env, err := exec.LookPath("env")
	n.Must(err)
	n.Must(os.Mkdir("/run/empty", 0o755))
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if err := unix.Mount("/run/empty", dir, "", unix.MS_BIND, ""); err != nil && !os.IsNotExist(err) {
			n.Fatalf("hiding %s: %v", dir, err)
		}
	}
	return []string{env, "PATH=/run/empty"}
}

// dropNetAdmin returns a command that executes another without the right to read
// and write tables.
func dropNetAdmin(n *nodetest.Node) []string {
	n.Load()
	path, err := exec.LookPath("setpriv")
	n.Must(err) // util-linux, which every Debian has
	return []string{path, "--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"}
}

// TestWithoutIP6Tables: on legacy canaryd reports a family without programs once
// and leaves it out.
func TestWithoutIP6Tables(t *testing.T) {
	nodetest.On(t, iptables.Legacy, func(n *nodetest.Node) {
		n.Families = []rules.Family{rules.IPv4}
		n.Must(scenario.Load(n.Context(), n.Programs, n.Families...))
		all, err := filepath.Glob("/usr/sbin/iptables-*")
		n.Must(err)
		n.Must(os.MkdirAll("/run/some", 0o755))
		for _, path := range all {
			target, err := filepath.EvalSymlinks(path)
			n.Must(err)
			text, err := os.ReadFile(target)
			n.Must(err)
			n.Must(os.WriteFile(filepath.Join("/run/some", filepath.Base(path)), text, 0o755))
		}
		// The flusher's programs must stay, although canaryd does not need them.
		nft, err := exec.LookPath("nft")
		n.Must(err)
		text, err := os.ReadFile(nft)
		n.Must(err)
		n.Must(os.WriteFile("/run/some/nft", text, 0o755))
		for _, dir := range []string{"/usr/sbin", "/sbin"} {
			n.Must(unix.Mount("/run/some", dir, "", unix.MS_BIND, ""))
		}
		protected := n.Protected()

		d := n.Start()
		d.WantLog("A family is not watched", "ipv6", "ip6tables-"+string(n.Programs.With)+" is not installed")
		if got := strings.Count(d.Log(), "A family is not watched"); got != 1 {
			n.Errorf("the missing family is reported %d times, want once", got)
		}
		for _, table := range protect.Always() {
			n.Must(n.Programs.Flush(n.Context(), rules.IPv4, table, ""))
		}
		n.Healed(1)
		n.Until("the protected rules", func() error {
			if got := n.Protected(); strings.Join(got, "\n") != strings.Join(protected, "\n") {
				return os.ErrNotExist
			}
			return nil
		})
		stdout, _ := n.Want(0, "check")
		if strings.Contains(stdout, "ipv6") {
			n.Errorf("check reports a family that is not there:\n%s", stdout)
		}
		table, _ := n.Want(0, "status")
		if !strings.Contains(table, "ipv6 is not watched") {
			n.Errorf("status does not say that IPv6 is not watched:\n%s", table)
		}
		d.Stop()
	})
}
