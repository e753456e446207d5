package source

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A busyError means that files are being written and must be read later.
type busyError struct{ path, reason string }

func (e *busyError) Error() string { return e.path + ": " + e.reason }

// read returns the content of a file, or a *busyError while another process writes it. A file of
// more than most bytes is an error.
//
// A file is being written if its size or times change during the read, or if it is open for
// writing. The kernel refuses a lease on a file that is open for writing (fcntl(2),
// F_SETLEASE). It does so on local file systems, for files of our own user or with CAP_LEASE.
// The Watcher also waits until the folder has been quiet, and compares all files before and
// after.
//
// canaryd cannot notice a writer that closes the file half-way and continues later. If the
// first half is valid, it counts. Writing a new file and renaming it over the old one is always
// safe.
func read(path string, most int64) ([]byte, error) {
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: is not a regular file", path) // opening a pipe would block
	} else if info.Size() > most {
		return nil, tooLarge(path)
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	before, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if isOpenForWriting(file) {
		return nil, &busyError{path, "another process has it open for writing"}
	}
	data, err := io.ReadAll(io.LimitReader(file, most+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > most {
		return nil, tooLarge(path)
	}
	after, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if stampOf(before) != stampOf(after) || int64(len(data)) != after.Size() {
		return nil, &busyError{path, "it changed while it was read"}
	}
	return data, nil
}

// isOpenForWriting reports whether a process has the file open for writing, as far as the
// kernel knows. It gives the lease back at once. A process that opens the file in between waits
// for that.
func isOpenForWriting(file *os.File) bool {
	_, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	if err == nil {
		_, _ = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_UNLCK) // closing the file would do
	}
	return errors.Is(err, unix.EAGAIN)
}

// maxRead bounds the total size of a source's files. 5,000 services with their endpoints are 10
// MiB of YAML, and decoding takes twenty times as much memory.
const maxRead = 64 << 20

func tooLarge(path string) error {
	return fmt.Errorf("%s: is too large: canaryd reads at most %d MiB of a source, all files together", path, maxRead>>20)
}

type file struct {
	name string
	data []byte
}

// files are the files of a source: one, or the wanted ones of a folder.
type files struct {
	path       string
	wanted     func(name string) bool
	kinds      string // names the wanted files in errors
	folderOnly bool
}

// read reads all wanted files, of at most maxRead bytes together. The error joins the errors of
// all files.
func (f files) read() ([]file, error) {
	names, err := f.list()
	if err != nil {
		return nil, err
	}
	all, bad := make([]file, len(names)), make([]error, len(names))
	left := int64(maxRead)
	for i, name := range names {
		all[i].name = name
		all[i].data, bad[i] = read(name, left)
		left -= int64(len(all[i].data))
	}
	return all, errors.Join(bad...)
}

// list returns path itself, or the wanted files of the folder, sorted. A folder without any is
// an error.
func (f files) list() ([]string, error) {
	info, err := os.Stat(f.path)
	switch {
	case err != nil:
		return nil, err
	case info.IsDir():
	case f.folderOnly:
		return nil, fmt.Errorf("%s: is not a folder", f.path)
	default:
		return []string{f.path}, nil
	}
	names, err := f.within()
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%s: the folder holds no file %s", f.path, f.kinds)
	}
	return names, err
}

// within returns the wanted files of the folder, sorted; none is no error.
func (f files) within() ([]string, error) {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries { // sorted by name
		if f.wanted(e.Name()) && !e.IsDir() {
			names = append(names, filepath.Join(f.path, e.Name()))
		}
	}
	return names, nil
}

// A stats describes a source's files without reading them.
type stats struct {
	// places are the names whose change may change the files' content.
	places []place
	// stamp changes if any file changes.
	stamp string
}

// A place is a name in a folder. It is watched through the folder, because a replaced or newly
// created file is another inode.
type place struct {
	folder string
	name   string                 // empty: all wanted names
	wanted func(name string) bool // nil with a name
}

// concerns reports whether an inotify event of this path may change the files, so that the
// Watcher must read them again. event is the path of the changed file or folder.
func (p place) concerns(event string) bool {
	if event == p.folder {
		return true
	}
	folder, name := filepath.Split(event)
	return filepath.Clean(folder) == p.folder && (name == p.name || p.wanted != nil && p.wanted(name))
}

// stat returns the stats of the files without reading them: a stamp that differs after a
// change, and the places to watch. An error becomes part of the stamp.
func (f files) stat() stats {
	places, resolved := follow(f.path)
	info, err := os.Stat(f.path)
	s := stats{places: places}
	s.add(f.path, info, err)
	if err != nil || !info.IsDir() {
		return s
	}
	s.places = append(s.places, place{folder: resolved, wanted: f.wanted})
	names, err := f.within()
	if err != nil {
		s.stamp += err.Error()
	}
	for _, name := range names {
		info, err := os.Lstat(name)
		if err == nil && info.Mode().Type() == fs.ModeSymlink {
			places, _ = follow(name)
			s.places = append(s.places, places...)
			info, err = os.Stat(name)
		}
		s.add(name, info, err)
	}
	return s
}

// add adds a file's size and times to the stamp, or the error instead; a folder adds only its
// name.
func (s *stats) add(path string, info fs.FileInfo, err error) {
	switch {
	case err != nil:
		s.stamp += err.Error() + "\n"
	case info.IsDir():
		s.stamp += path + "/\n" // its files follow
	default:
		s.stamp += path + " " + stampOf(info) + "\n"
	}
}

// stampOf returns a text that changes if the file is replaced or written to.
func stampOf(info fs.FileInfo) string {
	s := info.Sys().(*syscall.Stat_t) // Stat returns this type on Linux
	return fmt.Sprint(s.Dev, s.Ino, s.Mode, s.Size, s.Mtim, s.Ctim)
}

// maxLinks is how many symbolic links are followed, as in the kernel.
const maxLinks = 40

// follow walks a path as the kernel does. It returns each place where another link, file or
// folder would lead elsewhere: each symbolic link on the way, and the end. A path to a missing
// file ends at the missing name.
func follow(path string) (places []place, resolved string) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, path
	}
	resolved = "/"
	for rest, links := split(path), 0; len(rest) > 0; {
		step := rest[0]
		rest = rest[1:]
		switch step {
		case "", ".":
			continue
		case "..":
			resolved = filepath.Dir(resolved)
			continue
		}
		next := filepath.Join(resolved, step)
		info, err := os.Lstat(next)
		link := err == nil && info.Mode().Type() == fs.ModeSymlink
		if err != nil || link || len(rest) == 0 {
			places = append(places, place{folder: resolved, name: step})
		}
		if err != nil {
			return places, next
		}
		if !link {
			resolved = next
			continue
		}
		target, err := os.Readlink(next)
		if links++; err != nil || links > maxLinks {
			return places, next
		}
		if filepath.IsAbs(target) {
			resolved = "/"
		}
		rest = append(split(target), rest...)
	}
	return places, resolved
}

func split(path string) []string { return strings.Split(path, "/") }
