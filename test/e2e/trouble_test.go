package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTrouble: one line that says what to do, and exit code 2.
func TestTrouble(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		backend iptables.Backend
		// prepare makes the trouble and returns what comes before the command line.
		prepare func(n *node) []string
		flags   []string
		want    []string
	}{
		{
			name: "a file in the place of the state folder", backend: iptables.NFT,
			prepare: func(n *node) []string { n.must(os.WriteFile("/run/file", nil, 0o600)); return nil },
			flags:   []string{"--state-dir=/run/file"},
			want:    []string{"state folder /run/file", "not a directory", "--state-dir"},
		},
		{
			name: "a state folder that cannot be written", backend: iptables.NFT,
			prepare: func(n *node) []string {
				n.must(os.MkdirAll("/run/ro/generations", 0o700))
				n.must(unix.Mount("/run/ro", "/run/ro", "", unix.MS_BIND, ""))
				n.must(unix.Mount("", "/run/ro", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""))
				return nil
			},
			flags: []string{"--state-dir=/run/ro"},
			want:  []string{"state folder /run/ro is not writable", "read-only", "--state-dir"},
		},
		{
			name: "no programs, nft", backend: iptables.NFT, prepare: hidePrograms,
			want: []string{"iptables-nft is not installed", `install the package "iptables"`},
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
			prepare: func(n *node) []string { n.load(); n.start(); return nil },
			flags:   []string{"--socket=/run/other.sock", "--metrics-bind-address="},
			want:    []string{"another canaryd runs in this network namespace", "process "},
		},
		{
			name: "somebody at the socket", backend: iptables.NFT,
			prepare: func(n *node) []string {
				l, err := net.Listen("unix", "/run/taken.sock")
				n.must(err)
				n.Cleanup(func() { l.Close() })
				return nil
			},
			flags: []string{"--socket=/run/taken.sock"},
			want:  []string{"/run/taken.sock", "another canaryd", "--socket"},
		},
		{
			name: "a file in the place of the socket", backend: iptables.NFT,
			prepare: func(n *node) []string { n.must(os.WriteFile("/run/file", nil, 0o600)); return nil },
			flags:   []string{"--socket=/run/file"},
			want:    []string{"/run/file is in the way", "--socket"},
		},
		{
			name: "somebody at the port", backend: iptables.NFT,
			prepare: func(n *node) []string {
				l, err := net.Listen("tcp", "127.0.0.1:9475")
				n.must(err)
				n.Cleanup(func() { l.Close() })
				return nil
			},
			want: []string{"127.0.0.1:9475", "in use", "--metrics-bind-address"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			on(t, test.backend, func(n *node) {
				words := append(test.prepare(n), append([]string{os.Getenv(program)}, n.flags("run")...)...)
				words = append(words, test.flags...)
				cmd := exec.CommandContext(n.Context(), words[0], words[1:]...)
				time.AfterFunc(20*time.Second, func() { _ = cmd.Cancel() })
				code, stdout, stderr := n.exec(cmd)
				if code != 2 || stdout != "" {
					n.Errorf("exit code %d, stdout %q; want 2 and nothing\n%s", code, stdout, stderr)
				}
				n.oneLine(stderr)
				for _, word := range test.want {
					if !strings.Contains(stderr, word) {
						n.Errorf("want %q in %q", word, stderr)
					}
				}
			})
		})
	}
}

// hidePrograms takes the administrators' programs away from this mount
// namespace.
func hidePrograms(n *node) []string {
	env, err := exec.LookPath("env")
	n.must(err)
	n.must(os.Mkdir("/run/empty", 0o755))
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if err := unix.Mount("/run/empty", dir, "", unix.MS_BIND, ""); err != nil && !os.IsNotExist(err) {
			n.Fatalf("hiding %s: %v", dir, err)
		}
	}
	return []string{env, "PATH=/run/empty"}
}

// dropNetAdmin returns a command that executes another without the right to
// read and write tables.
func dropNetAdmin(n *node) []string {
	n.load()
	path, err := exec.LookPath("setpriv")
	n.must(err) // util-linux, which every Debian has
	return []string{path, "--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"}
}

// TestWithoutIP6Tables: a family that is not there is told once and left out.
func TestWithoutIP6Tables(t *testing.T) {
	onBoth(t, func(n *node) {
		n.families = []rules.Family{rules.IPv4}
		n.must(scenario.Load(n.Context(), n.programs, n.families...))
		all, err := filepath.Glob("/usr/sbin/iptables-*")
		n.must(err)
		n.must(os.MkdirAll("/run/some", 0o755))
		for _, path := range all {
			target, err := filepath.EvalSymlinks(path)
			n.must(err)
			text, err := os.ReadFile(target)
			n.must(err)
			n.must(os.WriteFile(filepath.Join("/run/some", filepath.Base(path)), text, 0o755))
		}
		// The flusher's programs must stay: nothing of canaryd's needs them.
		nft, err := exec.LookPath("nft")
		n.must(err)
		text, err := os.ReadFile(nft)
		n.must(err)
		n.must(os.WriteFile("/run/some/nft", text, 0o755))
		for _, dir := range []string{"/usr/sbin", "/sbin"} {
			n.must(unix.Mount("/run/some", dir, "", unix.MS_BIND, ""))
		}
		protected := n.protected()

		d := n.start()
		d.wantLog("A family is not watched", "ipv6", "ip6tables-"+string(n.programs.With)+" is not installed")
		if got := strings.Count(d.log(), "A family is not watched"); got != 1 {
			n.Errorf("the missing family is told %d times, want once", got)
		}
		for _, table := range rules.Guarded() {
			n.must(n.programs.Flush(n.Context(), rules.IPv4, table, ""))
		}
		n.healed(1)
		n.within(healsIn, "the protected rules", func() error {
			if got := n.protected(); strings.Join(got, "\n") != strings.Join(protected, "\n") {
				return os.ErrNotExist
			}
			return nil
		})
		stdout, _ := n.want(0, "check")
		if strings.Contains(stdout, "ipv6") {
			n.Errorf("check tells of a family that is not there:\n%s", stdout)
		}
		table, _ := n.want(0, "status")
		if !strings.Contains(table, "ipv6 is not watched") {
			n.Errorf("status does not say that IPv6 is not watched:\n%s", table)
		}
		d.stop()
	})
}
