package e2e

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
)

const (
	tcp           = "127.0.0.1:9475"
	controlSocket = "/run/canaryd/canaryd.sock"
)

// logLine matches the beginning of each line of canaryd's log.
var logLine = regexp.MustCompile(`^[IWE]\d{4} [0-9:.]+ +\d+ [a-z0-9_]+\.go:\d+\] "`)

// listeners returns the addresses at which this network namespace listens, by
// /proc/self/net: only canaryd is in it.
func listeners(n *nodetest.Node) []string {
	n.Helper()
	var all []string
	for _, proto := range []string{"tcp", "tcp6", "udp", "udp6", "udplite", "udplite6"} {
		for _, row := range rows(n, proto) {
			const listening = "0A"
			if strings.HasPrefix(proto, "tcp") && row[3] != listening {
				continue
			}
			all = append(all, proto+" "+row[1])
		}
	}
	for range rows(n, "packet") {
		all = append(all, "packet")
	}
	for _, row := range rows(n, "unix") {
		const accepts = "00010000" // __SO_ACCEPTCON of net/unix/af_unix.c
		if row[3] == accepts {
			all = append(all, "unix "+row[len(row)-1])
		}
	}
	slices.Sort(all)
	return all
}

// rows returns the words of each line of a file in /proc/self/net, without its
// heading. It returns nil if this kernel has no such protocol.
func rows(n *nodetest.Node, name string) [][]string {
	n.Helper()
	text, err := os.ReadFile("/proc/self/net/" + name)
	if os.IsNotExist(err) {
		return nil
	}
	n.Must(err)
	var all [][]string
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n")[1:] {
		all = append(all, strings.Fields(line))
	}
	return all
}

// TestListeners: by default another machine can reach nothing of canaryd. With an
// empty address canaryd does not listen on IP at all.
func TestListeners(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		local := []string{"unix " + controlSocket, "unix @canaryd.lock"}
		loopback := fmt.Sprintf("tcp %08X:%04X", binary.NativeEndian.Uint32([]byte{127, 0, 0, 1}), 9475)
		d := n.Start()
		n.Flush()
		n.Healed(1)
		n.Same("listeners", append([]string{loopback}, local...), listeners(n))
		for path, want := range map[string]os.FileMode{
			controlSocket: os.ModeSocket | 0o600, filepath.Dir(controlSocket): os.ModeDir | 0o700,
			"/run/state": os.ModeDir | 0o700, "/run/state/state.json": 0o600, "/run/state/journal.jsonl": 0o600,
		} {
			info, err := os.Lstat(path)
			n.Must(err)
			if info.Mode() != want {
				n.Errorf("%s has mode %v, want %v", path, info.Mode(), want)
			}
		}
		d.Stop()

		d = n.Launch("--metrics-bind-address=")
		n.Until("the control socket", func() error {
			code, _, stderr := n.Canaryd("status")
			if code != 0 {
				return fmt.Errorf("exit code %d: %s", code, stderr)
			}
			return nil
		})
		n.Same("listeners without an address", local, listeners(n))
		d.Stop()
	})
}

// TestStrangersAtTheSocket: another user cannot connect. If an operator opens
// socket and folder to all, that user still gets no answer.
func TestStrangersAtTheSocket(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T) // a user namespace of ours has only one user
		n.Load()
		d := n.Start()
		const stranger = 65534
		if err := nodetest.AsUser(stranger, func() error { return ask(controlSocket) }); err == nil || !strings.Contains(err.Error(), "permission denied") {
			n.Errorf("user %d connects: got %v, want permission denied", stranger, err)
		}
		n.Must(os.Chmod(filepath.Dir(controlSocket), 0o755))
		n.Must(os.Chmod(controlSocket, 0o666))
		if err := nodetest.AsUser(stranger, func() error { return ask(controlSocket) }); err == nil || strings.Contains(err.Error(), "permission denied") {
			n.Errorf("user %d at a socket that is free for all: got %v, want a connection that is closed", stranger, err)
		}
		if err := nodetest.AsUser(0, func() error { return ask(controlSocket) }); err != nil {
			n.Errorf("root: %v", err)
		}
		d.WantLog("A connection to the control socket was refused", fmt.Sprintf("uid=%d", stranger))
		n.Want(0, "status")
		d.Stop()
	})
}

// ask sends a request to a Unix socket, on this thread, and expects an answer.
func ask(path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	// The other end may have closed it already.
	if err := unix.Sendto(fd, []byte("GET /v1/status HTTP/1.0\r\n\r\n"), unix.MSG_NOSIGNAL, nil); err != nil {
		return fmt.Errorf("asking: %w", err)
	}
	answer := make([]byte, 64)
	size, err := unix.Read(fd, answer)
	if err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	if !strings.HasPrefix(string(answer[:size]), "HTTP/1.0 200 OK") {
		return fmt.Errorf("the answer is %q", answer[:size])
	}
	return nil
}

// TestForeignHostNames: canaryd answers no request under another name (DNS
// rebinding), unless the operator allowed it. internal/web tests each path and
// name.
func TestForeignHostNames(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		for _, flags := range [][]string{nil, {"--metrics-bind-address=:9475", "--metrics-host=node-1"}} {
			d := n.Start(flags...)
			for host, want := range map[string]int{"localhost:8080": http.StatusOK, "evil.example:9475": http.StatusMisdirectedRequest,
				"node-1:9475": map[bool]int{false: http.StatusMisdirectedRequest, true: http.StatusOK}[flags != nil]} {
				request, err := http.NewRequestWithContext(n.Context(), http.MethodGet, nodetest.HTTP+"/metrics", nil)
				n.Must(err)
				request.Host = host
				response, err := http.DefaultClient.Do(request)
				n.Must(err)
				response.Body.Close()
				if response.StatusCode != want {
					n.Errorf("%q: GET /metrics for %s: %s, want %d", flags, host, response.Status, want)
				}
			}
			d.Stop()
		}
	})
}

// TestRequestsAreBounded: canaryd cuts off a request without end, a request that
// is too large, and bytes that are no request. test/limits tests many connections
// at once.
func TestRequestsAreBounded(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		slow, err := net.Dial("tcp", tcp)
		n.Must(err)
		defer slow.Close()
		_, err = io.WriteString(slow, "GET /metrics HTTP/1.1\r\nX-Slow: ")
		n.Must(err)
		n.Must(slow.SetDeadline(time.Now().Add(2 * time.Minute)))
		if _, err := io.Copy(io.Discard, slow); errors.Is(err, os.ErrDeadlineExceeded) {
			n.Errorf("a request that never ends is not cut off: %v", err)
		}
		for network, address := range map[string]string{"tcp": tcp, "unix": controlSocket} {
			for name, request := range map[string]string{
				"a header of a megabyte":    "GET / HTTP/1.1\r\nHost: x\r\nX-Large: " + strings.Repeat("a", 1<<20) + "\r\n\r\n",
				"a body without end":        "POST /v1/restore HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n{\"generation\":\"" + strings.Repeat("a", 1<<20),
				"chunks without end":        "POST /v1/look HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n{\"" + strings.Repeat("a", 1<<20-2),
				"something else altogether": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
			} {
				conn, err := net.Dial(network, address)
				n.Must(err)
				n.Must(conn.SetDeadline(time.Now().Add(2 * time.Minute)))
				go func() { _, _ = io.WriteString(conn, request) }() // canaryd cuts it off
				response, err := http.ReadResponse(bufio.NewReader(conn), nil)
				conn.Close()
				// Closing a connection with unread bytes may overtake the answer.
				if err == nil && response.StatusCode < 400 {
					n.Errorf("%s over %s: %s", name, network, response.Status)
				}
			}
		}
		n.Want(0, "status")
		n.Must(nodetest.Ready())
		d.Stop()
	})
}

// secret is in comments of rules and in a flusher's command line.
const secret = "S3CRET"

// TestNothingLeaksOverTCP: no path over TCP may show the content of a rule or a
// flusher's command line, before, in and after a flush. The socket shows them.
func TestNothingLeaksOverTCP(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		for _, rule := range []string{
			"-t nat -A KUBE-SERVICES -d 203.0.113.7/32 -m comment --comment " + secret + " -j KUBE-MARK-MASQ",
			"-t filter -A KUBE-FORWARD -m comment --comment " + secret + " -j ACCEPT",
			"-t filter -I FORWARD -m comment --comment " + secret + " -j KUBE-FORWARD",
		} {
			nstest.Command(n.T, "iptables-"+string(n.Programs.With), strings.Fields("-w 5 "+rule)...)
		}
		look := func(when string) {
			n.Helper()
			for _, path := range []string{"/", "/metrics", "/healthz", "/readyz", "/api/v1/status", "/api/v1/", "/v1/status", "/v1/generation", "/v1/flush?name=1",
				"/debug/pprof/", "/debug/pprof/cmdline", "/debug/vars", "/flushes", "/api/v1/flushes/1", "/favicon.ico", "/../state/state.json"} {
				response, err := http.Get(nodetest.HTTP + path)
				n.Must(err)
				body, err := io.ReadAll(response.Body)
				response.Body.Close()
				n.Must(err)
				for _, leak := range []string{secret, "203.0.113.7", "/32", "-j "} {
					if strings.Contains(fmt.Sprint(response.Header)+string(body), leak) {
						n.Errorf("%s: GET %s shows %q:\n%s", when, path, leak, body)
					}
				}
				if known := slices.Contains([]string{"/", "/metrics", "/healthz", "/api/v1/status"}, path); known != (response.StatusCode == http.StatusOK) && path != "/readyz" {
					n.Errorf("%s: GET %s: %s", when, path, response.Status)
				}
			}
		}
		d := n.Start("--mode=observe")
		look("before a flush")
		for _, table := range protect.Always() {
			nstest.Command(n.T, "iptables-"+string(n.Programs.With), "-w", "5", "-M", "/"+secret, "-t", string(table), "-F")
		}
		n.Until("the flush to be noticed", func() error {
			if code, _, _ := n.Canaryd("check"); code != 1 {
				return fmt.Errorf("check ends with %d", code)
			}
			return nil
		})
		look("in a flush")
		text, _ := n.Want(0, "render", "--ip-family=ipv4")
		if !strings.Contains(text, secret) {
			n.Errorf("the socket does not show the rules either, so this test shows nothing:\n%s", text)
		}
		n.Want(0, "restore")
		n.Until("health", nodetest.Ready)
		look("after a flush")
		if told, _ := n.Want(0, "status", "--flush=1"); !strings.Contains(told, secret) {
			n.Errorf("the socket does not show what was flushed either:\n%s", told)
		}
		private, _ := n.Want(0, "status", "-o", "json")
		n.Logf("the command line was caught: %t", strings.Contains(private, secret))
		d.Stop()
	})
}

// TestHostileRules: comments that imitate other rules, options or lines of a save must come back
// unchanged and have no other effect. canaryd writes these rules by their bytes.
func TestHostileRules(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		program := "iptables-" + string(n.Programs.With)
		builtin := func() string {
			n.Helper()
			var all string
			for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
				for line := range strings.Lines(nstest.Command(n.T, program, "-w", "5", "-S", chain)) {
					if !strings.Contains(strings.ToLower(line), "canaryd") { // our witnesses
						all += line
					}
				}
			}
			return all
		}
		before := builtin()
		for _, comment := range []string{
			`" -j ACCEPT -m comment --comment "`, `\" -j DROP \\`, `'; reboot #`, "$(reboot) `reboot` %s %n", "COMMIT", "*nat", ":INPUT DROP [0:0]", "-F",
			"a\x1b[31mb\x07", // commands a terminal
			"x\nCOMMIT\n*filter\n:OUTPUT DROP [0:0]\n-A INPUT -s 203.0.113.8 -j ACCEPT\nCOMMIT\n*filter\n-A INPUT -m comment --comment x",
		} {
			nstest.Command(n.T, program, "-w", "5", "-I", "KUBE-FORWARD", "-s", "203.0.113.7", "-j", "DROP", "-m", "comment", "--comment", comment)
		}
		d := n.Start("--v=4")
		n.Want(0, "restore")
		prints(n, d)
		if diff := cmp.Diff(before, builtin()); diff != "" {
			n.Errorf("built-in chains (-want +got):\n%s", diff)
		}
		if stdout, _ := n.Want(0, "status"); strings.Contains(stdout, "not put back if it is lost") {
			n.Errorf("status says that a rule cannot be put back:\n%s", stdout)
		}
		listed := asListed(n)
		n.Flush()
		n.Healed(1)
		n.Same("protected rules", listed, asListed(n))
		prints(n, d)
		d.Stop()
	})
}

// TestHostileNames: the name of a chain commands a terminal. canaryd's output for
// people must not contain the commands. No restore can write such a name on both
// backends, so the chain is not protected, but everything else is.
func TestHostileNames(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		const evil = "EVIL\x1b[2J\x1b]0;x\x07"
		run := func(words ...string) {
			n.Helper()
			nstest.Command(n.T, "iptables-"+string(n.Programs.With), append([]string{"-w", "5"}, words...)...)
		}
		n.Load()
		protected := n.Protected()
		run("-N", evil)
		run("-A", evil, "-j", "RETURN")
		run("-A", "FORWARD", "-j", evil)
		d := n.Launch("--protect=kube,cni,EVIL*", "--v=4")
		n.Until("canaryd to be ready", nodetest.Ready)
		n.Until("canaryd to know all rules", func() error {
			if s := n.Status(); s.Generation.Rules < len(protected)/2 {
				return fmt.Errorf("%d rules", s.Generation.Rules)
			}
			return nil
		})
		n.Flush()
		n.Healed(1)
		n.Same("protected rules", protected, n.Protected())
		prints(n, d)
		d.Stop()
	})
}

// prints fails unless canaryd's output for people is safe for a terminal, and
// each line of its log is one entry.
func prints(n *nodetest.Node, d *nodetest.Process) {
	n.Helper()
	said := map[string]string{"the log": d.Log()}
	for _, path := range []string{"/", "/api/v1/status", "/metrics", "/healthz"} {
		said[path] = n.Get(path)
	}
	for _, words := range []string{"status", "status -o json", "status --flush 1", "status --flush 1 -o json", "check", "check -o line", "check -o json"} {
		all := strings.Fields(words)
		_, stdout, stderr := n.Canaryd(all[0], all[1:]...)
		said[words] = stdout + stderr
	}
	for name, text := range said {
		if strings.ContainsAny(text, "\x1b\x07") {
			n.Errorf("%s holds what a terminal obeys: %q", name, text)
		}
	}
	for line := range strings.Lines(d.Log()) {
		if strings.HasPrefix(line, `{"event":"flush"`) && json.Valid([]byte(line)) { // of standard output
			continue
		}
		if !logLine.MatchString(line) || strings.Contains(line, " plain.go:") {
			n.Errorf("no line of the log by itself: %q", line)
		}
	}
}
