package watch

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestCommitterThatNeverRests: the same process commits again and again. For a
// second canaryd reads only its identity again, and then everything.
func TestCommitterThatNeverRests(t *testing.T) {
	const pid, comm = 7, "kube-proxy"
	begin := time.Now()
	write := func(t *testing.T, proc, name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(proc, "7", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		name          string
		then          func(t *testing.T, proc string)
		comm          string
		after         time.Duration
		command, unit string
	}{
		{"it commits again", nil, comm, 30 * time.Millisecond, "kube-proxy -v2", "first.service"},
		{"a second later", nil, comm, time.Second, "kube-proxy -v2", "second.service"},
		{"it executes another program", func(t *testing.T, proc string) { write(t, proc, "cmdline", "kube-proxy\x00--cleanup\x00") },
			comm, 30 * time.Millisecond, "kube-proxy --cleanup", "second.service"},
		{"it gets another name", func(t *testing.T, proc string) { write(t, proc, "comm", "nft\n") }, "nft", 30 * time.Millisecond, "kube-proxy -v2", "second.service"},
		{"it has ended", func(t *testing.T, proc string) {
			if err := os.RemoveAll(filepath.Join(proc, "7")); err != nil {
				t.Fatal(err)
			}
		}, comm, 30 * time.Millisecond, "", ""},
		{"another process has its number", func(t *testing.T, proc string) {
			if err := os.Rename(filepath.Join(proc, "7"), filepath.Join(proc, "8")); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"cmdline", "comm", "cgroup"} {
				if err := os.Remove(filepath.Join(proc, "8", name)); err != nil {
					t.Fatal(err) // as for a process that has ended
				}
			}
			if err := os.Mkdir(filepath.Join(proc, "7"), 0o755); err != nil {
				t.Fatal(err)
			}
			write(t, proc, "comm", comm+"\n")
			write(t, proc, "cmdline", "kube-proxy -v2")
			write(t, proc, "cgroup", "0::/other.service\n")
		}, comm, 30 * time.Millisecond, "kube-proxy -v2", "other.service"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			proc := fakeProc(t, pid, comm, "kube-proxy\x00-v2\x00")
			write(t, proc, "cgroup", "0::/first.service\n")
			var c committer
			defer c.forget()
			if p := c.of(proc, pid, comm, begin); p.command != "kube-proxy -v2" || p.origin.Unit != "first.service" {
				t.Fatalf("the first commit is by %q of %q", p.command, p.origin.Unit)
			}
			write(t, proc, "cgroup", "0::/second.service\n")
			if tt.then != nil {
				tt.then(t, proc)
			}
			p := c.of(proc, pid, tt.comm, begin.Add(tt.after))
			command, o := p.command, p.origin
			if command != tt.command || o.Unit != tt.unit {
				t.Errorf("the second commit is by %q of %q, want %q of %q", command, o.Unit, tt.command, tt.unit)
			}
		})
	}
}
