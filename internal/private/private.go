// Package private keeps folders and files from other users, and opens no file that
// another user could have put there.
package private

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Folder makes a folder of mode 0700 at path, with its parents, if there is none. One that
// is there is an error if another user owns it, may write to it, or may put
// another one in its place. If it is ours it gets mode 0700: Kubernetes makes 0755.
func Folder(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	// A link leads to the folder; its own place matters as well.
	for parent := filepath.Dir(path); ; parent = filepath.Dir(parent) {
		if err := judge(parent, true); err != nil {
			return err
		}
		if parent == "/" {
			break
		}
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return err
	}
	for parent := filepath.Dir(path); parent != "/"; parent = filepath.Dir(parent) {
		if err := judge(parent, true); err != nil {
			return err
		}
	}
	if err := judge(path, false); err != nil {
		return err
	}
	return tighten(path)
}

// judge returns why a folder is not safe from other users. In a parent with the sticky
// bit, such as /tmp, others may write, but cannot move what is not theirs.
func judge(path string, parent bool) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is no folder", path)
	}
	owner := info.Sys().(*syscall.Stat_t) // what Stat returns on Linux
	if !trusted(owner.Uid) && (!parent || !unmapped(owner.Uid)) {
		return fmt.Errorf("%s belongs to user %d, who could change what canaryd reads there%s", path, owner.Uid, advice(parent, "give it to root: chown root "+path))
	}
	sticky := parent && info.Mode()&fs.ModeSticky != 0
	groupWrites := info.Mode().Perm()&0o020 != 0 && owner.Gid != 0 && owner.Gid != uint32(os.Getegid())
	if !sticky && (groupWrites || info.Mode().Perm()&0o002 != 0) {
		return fmt.Errorf("other users may write to %s (mode %04o), and change what canaryd reads there%s", path, info.Mode().Perm(), advice(parent, "forbid that: chmod go-w "+path))
	}
	return nil
}

// advice is what to do about a folder of canaryd's own. Those above it serve others, too.
func advice(parent bool, what string) string {
	if parent {
		return ""
	}
	return "; " + what
}

// tighten sets mode 0700 on a folder of our own.
func tighten(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Sys().(*syscall.Stat_t).Uid != uint32(os.Geteuid()) || info.Mode().Perm() == 0o700 {
		return nil
	}
	return os.Chmod(path, 0o700)
}

// trusted reports whether a user is root or our own.
func trusted(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }

// unmapped reports whether a user is one that this user namespace has no number for.
// The machine's root, who owns / there, is one of them.
func unmapped(uid uint32) bool {
	const overflow = 65534 // /proc/sys/kernel/overflowuid, unless an operator changed it
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil || uid != overflow {
		return false
	}
	return strings.Join(strings.Fields(string(text)), " ") != "0 0 4294967295"
}

// Open opens a regular file of root's or our own. It follows no link in the last place
// and waits for no pipe; either is an error. flag is as in os.OpenFile.
func Open(path string, flag int) (*os.File, error) {
	file, err := os.OpenFile(path, flag|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("%s is a link; canaryd follows none", path)
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s is no regular file", path)
	case !trusted(info.Sys().(*syscall.Stat_t).Uid):
		err = fmt.Errorf("%s belongs to user %d; canaryd reads only root's files and its own", path, info.Sys().(*syscall.Stat_t).Uid)
	default:
		return file, nil
	}
	_ = file.Close() // the first error is the one to report
	return nil, err
}

// Read returns what a file that Open opens holds. One of more than most bytes is an error.
func Read(path string, most int64) ([]byte, error) {
	file, err := Open(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > most {
		return nil, fmt.Errorf("%s is too large: it has %d bytes, and canaryd reads %d at most", path, info.Size(), most)
	}
	return io.ReadAll(io.LimitReader(file, most))
}

// Unfinished ends the name of a file that Write has not finished.
const Unfinished = ".new"

// Write writes a file of mode 0600 so that a process that is killed meanwhile
// leaves the old one or the new one. It does not wait for the disk.
func Write(path string, data []byte) error {
	return Stream(filepath.Dir(path), func(file io.Writer) (string, error) {
		_, err := file.Write(data)
		return filepath.Base(path), err
	})
}

// Stream writes a file into a folder as Write does, piece by piece: fill writes it and
// returns its name, which may depend on what was written.
func Stream(folder string, fill func(io.Writer) (name string, err error)) (err error) {
	file, err := os.CreateTemp(folder, ".*"+Unfinished)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name()) // a full disk needs the room
		}
	}()
	name, err := fill(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), filepath.Join(folder, name))
}
