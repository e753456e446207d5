// Package private reads and writes files that other users cannot change, and opens no file that
// another user could have put there.
//
// [Folder] makes the folder. [Write] and [Stream] replace a file as a whole; [Summed] adds a
// checksum. [Read] and [Open] open a file, and [SumHolds] verifies its checksum. A file of another
// user is an error, and so is a folder that another user may change. Any goroutine may call the
// functions.
package private

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Folder makes a folder of mode 0700 at path, with its parents, if it does not exist. An
// existing folder is an error if another user owns it, may write to it, or may replace it. A
// folder of our own user gets mode 0700, because Kubernetes makes 0755.
func Folder(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	// path may be a link: check the folders of the link, then those of its target.
	if err := checkParents(path); err != nil {
		return err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return err
	}
	if err := cmp.Or(checkParents(path), checkFolder(path, false)); err != nil {
		return err
	}
	return restrict(path)
}

// checkParents checks all parents of path: a user who may replace one of them could replace the
// folder.
func checkParents(path string) error {
	for parent := filepath.Dir(path); ; parent = filepath.Dir(parent) {
		if err := checkFolder(parent, true); err != nil || parent == "/" {
			return err
		}
	}
}

// checkFolder returns why a folder is not safe from other users; nil if it is. In a parent with
// the sticky bit, such as /tmp, other users may write, but not move our files.
func checkFolder(path string, parent bool) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a folder", path)
	}
	owner := info.Sys().(*syscall.Stat_t) // Stat returns this type on Linux
	if !isTrusted(owner.Uid) && (!parent || !isUnmapped(owner.Uid)) {
		return fmt.Errorf("%s belongs to user %d, which could change its content%s", path, owner.Uid, advice(parent, "give it to root: chown root "+path))
	}
	sticky := parent && info.Mode()&fs.ModeSticky != 0
	groupWrites := info.Mode().Perm()&0o020 != 0 && owner.Gid != 0 && owner.Gid != uint32(os.Getegid())
	if !sticky && (groupWrites || info.Mode().Perm()&0o002 != 0) {
		return fmt.Errorf("other users may write to %s (mode %04o), and change its content%s", path, info.Mode().Perm(), advice(parent, "forbid that: chmod go-w "+path))
	}
	return nil
}

// advice returns the remedy for canaryd's own folder; a parent also serves other programs.
func advice(parent bool, what string) string {
	if parent {
		return ""
	}
	return "; " + what
}

// restrict gives a folder of our own user mode 0700; another user's folder stays as it is.
func restrict(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Sys().(*syscall.Stat_t).Uid != uint32(os.Geteuid()) || info.Mode().Perm() == 0o700 {
		return nil
	}
	return os.Chmod(path, 0o700)
}

func isTrusted(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }

// isUnmapped reports whether this user namespace has no number for a user. The machine's root,
// which owns / there, is such a user.
func isUnmapped(uid uint32) bool {
	const overflow = 65534 // /proc/sys/kernel/overflowuid, unless an operator changed it
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil || uid != overflow {
		return false
	}
	return strings.Join(strings.Fields(string(text)), " ") != "0 0 4294967295"
}

// Open opens a regular file that belongs to root or our own user, so that no other user can
// feed canaryd a file. A link at the end of path is an error. So is a pipe, and Open does not
// wait for it. flag is as in os.OpenFile.
func Open(path string, flag int) (*os.File, error) {
	file, err := os.OpenFile(path, flag|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link, which canaryd does not follow here: replace it by the file", path)
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s is not a regular file", path)
	case !isTrusted(info.Sys().(*syscall.Stat_t).Uid):
		err = fmt.Errorf("%s belongs to user %d; canaryd reads only root's files and its own", path, info.Sys().(*syscall.Stat_t).Uid)
	default:
		return file, nil
	}
	_ = file.Close() // the first error is the one to report
	return nil, err
}

// Read returns the content of a file, which it opens with Open. A file of more than most bytes
// is an error.
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

// Unfinished is the end of a file's name while Write is writing it.
const Unfinished = ".new"

// Write writes a file of mode 0600. A process that is killed meanwhile leaves the old file or the
// new one. It does not sync.
func Write(path string, data []byte) error {
	return Stream(filepath.Dir(path), func(file io.Writer) (string, error) {
		_, err := file.Write(data)
		return filepath.Base(path), err
	})
}

// Lasting turns an error about a file with a random name into an error about its folder. The
// next try, which fails for the same reason, then has the same words, and is not logged again.
func Lasting(err error, folder string) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok && filepath.Dir(p.Path) == filepath.Clean(folder) {
		return &fs.PathError{Op: p.Op, Path: folder, Err: p.Err}
	}
	return err
}

// Stream is Write in pieces. fill writes the file and returns its name, which may depend on the
// content.
func Stream(folder string, fill func(io.Writer) (name string, err error)) (err error) {
	file, err := os.CreateTemp(folder, ".*"+Unfinished)
	if err != nil {
		return Lasting(err, folder)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name()) // a full disk needs the room
			err = Lasting(err, folder)
		}
	}()
	name, err := fill(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), filepath.Join(folder, name))
}
