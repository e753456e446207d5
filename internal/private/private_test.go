package private

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const nobody = 65534

// TestFolder: a folder is refused if another user can change its content.
func TestFolder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can give a folder to another user")
	}
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, above string) // makes above/state; the folder above is there
		want    string                           // in the error; empty: none
	}{
		{"there is none", func(*testing.T, string) {}, ""},
		{"as Kubernetes makes it", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o755))
		}, ""},
		{"others may write to it", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chmod(above+"/state", 0o777))
		}, "other users may write to"},
		{"others may write to it, with the sticky bit", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chmod(above+"/state", 0o777|os.ModeSticky))
		}, "other users may write to"},
		{"a group may write to it", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chown(above+"/state", 0, nobody))
			must(t, os.Chmod(above+"/state", 0o770))
		}, "other users may write to"},
		{"root's group may write to it", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chmod(above+"/state", 0o770))
		}, ""},
		{"it is another user's", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chown(above+"/state", nobody, nobody))
		}, "belongs to user 65534"},
		{"another user may replace it", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chmod(above, 0o777))
		}, "other users may write to"},
		{"the folder above is another user's", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chown(above, nobody, nobody))
		}, "belongs to user 65534"},
		{"in a folder such as /tmp", func(t *testing.T, above string) {
			must(t, os.Mkdir(above+"/state", 0o700))
			must(t, os.Chmod(above, 0o777|os.ModeSticky))
		}, ""},
		{"a link to a folder of ours", func(t *testing.T, above string) {
			must(t, os.Symlink(t.TempDir(), above+"/state"))
		}, ""},
		{"a link to where another user may replace it", func(t *testing.T, above string) {
			open := t.TempDir()
			must(t, os.Mkdir(open+"/state", 0o700))
			must(t, os.Chmod(open, 0o777))
			must(t, os.Symlink(open+"/state", above+"/state"))
		}, "other users may write to"},
	} {
		t.Run(c.name, func(t *testing.T) {
			above := t.TempDir()
			c.prepare(t, above)
			err := Folder(above + "/state")
			if c.want == "" {
				must(t, err)
				info, err := os.Stat(above + "/state")
				must(t, err)
				if info.Mode().Perm() != 0o700 {
					t.Errorf("mode %04o, want 0700", info.Mode().Perm())
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

// TestOpen: a file that is not regular, or not ours, is not opened, and Open does not wait for
// a pipe.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, []byte("x"), 0o600))
	must(t, os.Symlink(file, dir+"/link"))
	must(t, syscall.Mkfifo(dir+"/pipe", 0o600))
	for name, want := range map[string]string{"file": "", "link": "is a symbolic link", "pipe": "is not a regular file", "none": "no such file"} {
		for _, flag := range []int{os.O_RDONLY, os.O_RDWR} {
			f, err := Open(filepath.Join(dir, name), flag)
			if want == "" {
				must(t, err)
				must(t, f.Close())
			} else if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want an error with %q", name, err, want)
			}
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can give a file to another user")
	}
	must(t, os.Chown(file, nobody, nobody))
	if _, err := Open(file, os.O_RDONLY); err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("a file of another user: got %v", err)
	}
}

// TestWrite: the file is replaced as a whole, with mode 0600, and no other file is left.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	must(t, os.WriteFile(path, []byte("old"), 0o644))
	must(t, Write(path, []byte("new")))
	text, err := os.ReadFile(path)
	must(t, err)
	info, err := os.Stat(path)
	must(t, err)
	if string(text) != "new" || info.Mode().Perm() != 0o600 {
		t.Errorf("%q, mode %04o", text, info.Mode().Perm())
	}
	if err := Write(filepath.Join(dir, "none", "file"), nil); err == nil {
		t.Error("a file in a folder that is not there: no error")
	}
	must(t, os.Mkdir(filepath.Join(dir, "taken"), 0o700))
	if err := Write(filepath.Join(dir, "taken"), nil); err == nil {
		t.Error("a file in place of a folder: no error")
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != 2 {
		t.Errorf("left behind: %v", entries)
	}
}

// TestStream: a file gets the name that its writer returns at the end. If the writer fails, no
// file is left, not even a part.
func TestStream(t *testing.T) {
	dir := t.TempDir()
	write := func(err error) error {
		return Stream(dir, func(file io.Writer) (string, error) {
			_, _ = io.WriteString(file, "new")
			return "file", err
		})
	}
	if err := write(io.ErrShortWrite); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("error is %v", err)
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != 0 {
		t.Errorf("left behind: %v", entries)
	}
	must(t, write(nil))
	text, err := os.ReadFile(filepath.Join(dir, "file"))
	must(t, err)
	info, err := os.Stat(filepath.Join(dir, "file"))
	must(t, err)
	if string(text) != "new" || info.Mode().Perm() != 0o600 {
		t.Errorf("%q, mode %04o", text, info.Mode().Perm())
	}
}
