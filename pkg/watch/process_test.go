package watch

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// fakeProc returns a /proc that holds one process.
func fakeProc(t *testing.T, pid uint32, comm, cmdline string) string {
	t.Helper()
	proc := t.TempDir()
	dir := filepath.Join(proc, strconv.Itoa(int(pid)))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"comm": comm + "\n", "cmdline": cmdline} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return proc
}

// processOf returns the result of a committer without an earlier process.
func processOf(proc string, pid uint32, comm string) (string, Origin) {
	var c committer
	defer c.forget()
	p := c.of(proc, pid, comm, time.Now())
	return p.command, p.origin
}

func TestProcessCommand(t *testing.T) {
	tests := []struct {
		name          string
		comm, cmdline string
		pid           uint32
		fromKernel    string
		want          string
	}{
		{"words are parted by NUL", "iptables", "iptables\x00-t\x00nat\x00-F\x00", 7, "iptables", "iptables -t nat -F"},
		{"the pid is gone", "iptables", "iptables\x00-F\x00", 8, "iptables", ""},
		{"the pid is another's in this namespace", "nginx", "nginx\x00", 7, "iptables", ""},
		{"the kernel cuts a name at 15 bytes", "kube-controller", "kube-controller-manager\x00", 7, "kube-controller", "kube-controller-manager"},
		{"no pid", "iptables", "iptables\x00", 0, "iptables", ""},
		{"no name", "", "iptables\x00", 7, "", ""},
		{"a kernel thread has no command line", "kworker/0:1", "", 7, "kworker/0:1", ""},
		{"an empty word stays", "sh", "sh\x00\x00x\x00", 7, "sh", "sh  x"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			proc := fakeProc(t, 7, tt.comm, tt.cmdline)
			if got, _ := processOf(proc, tt.pid, tt.fromKernel); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// TestProcessOfAnotherPIDNamespace: in a pod, a process with the number and the
// name of the flusher is another process.
func TestProcessOfAnotherPIDNamespace(t *testing.T) {
	proc := fakeProc(t, 7, "iptables", "iptables\x00-S\x00")
	if got, _ := processOf(proc, 7, "iptables"); got != "iptables -S" {
		t.Errorf("the command line is %q", got)
	}
	ns := filepath.Join(proc, "self", "ns")
	if err := os.MkdirAll(ns, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(ns, "pid"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if got, o := processOf(proc, 7, "iptables"); got != "" || o.Ancestors != nil {
		t.Errorf("a process of another pid namespace is said to have run %q", got)
	}
}

func TestProcessCommandOfOurselves(t *testing.T) {
	pid := uint32(os.Getpid())
	p := readProcess(procFolder, pid)
	got, _ := processOf(procFolder, pid, p.comm)
	if got != p.command {
		t.Errorf("our command line is %q and %q", got, p.command)
	}
	if !strings.Contains(got, os.Args[0]) && !strings.HasPrefix(os.Args[0], got) {
		t.Errorf("got %q, want our own command line, %q", got, os.Args)
	}
}

func TestPrintable(t *testing.T) {
	tests := []struct{ name, in, want string }{
		{"plain", "iptables -F", "iptables -F"},
		{"a new line would forge a log line", "a\nb", `a\x0ab`},
		{"an escape would drive a terminal", "\x1b[2J", `\x1b[2J`},
		{"other alphabets print", "größe 鳥", "größe 鳥"},
		{"broken UTF-8", "a\xff\xc3", `a\xff\xc3`},
		{"an override of direction does not print", "a\u202eb", `a\xe2\x80\xaeb`},
		{"bounded", strings.Repeat("a", 600), strings.Repeat("a", maxCommand)},
		{"bounded before a character, not within", strings.Repeat("a", maxCommand-1) + "ö", strings.Repeat("a", maxCommand-1)},
		{"escapes count", strings.Repeat("\x01", 600), strings.Repeat(`\x01`, maxCommand/4)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := printable([]byte(tt.in), maxCommand); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
