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

// A busyError tells that files are being written and must be read later.
type busyError struct{ path, reason string }

func (e *busyError) Error() string { return e.path + ": " + e.reason }

// read returns what a file holds, or a *busyError while somebody writes it.
//
// Somebody does if the file is open for writing, which the kernel tells by
// refusing a lease (fcntl(2), F_SETLEASE; local file systems, and files that
// are ours unless we have CAP_LEASE), or if its size or times change while it is
// read. A reader also waits until the folder has been quiet (see Watcher), and
// compares all files together before and after. What no reader can tell is a
// writer that closes the file half-way and goes on later: if what stands there
// is a whole YAML document, it counts. Who writes a new file and renames it
// over the old one is always safe.
//
// A file of more than most bytes is an error.
func read(path string, most int64) ([]byte, error) {
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: is no plain file", path) // and opening a pipe would wait
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
	if openForWriting(file) {
		return nil, &busyError{path, "somebody has it open for writing"}
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

// openForWriting reports whether anybody has the file open for writing, as
// far as the kernel tells. The lease is given back at once; a writer that
// opens the file in between waits for that long.
func openForWriting(file *os.File) bool {
	_, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	if err == nil {
		_, _ = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_UNLCK) // closing the file does it too
	}
	return errors.Is(err, unix.EAGAIN)
}

// mostRead bounds what is read of a source, all its files together: 5,000 services with
// their endpoints are 10 MiB of YAML, which takes twenty times as much memory while it is
// decoded.
const mostRead = 64 << 20

func tooLarge(path string) error {
	return fmt.Errorf("%s: is too large: of a source, all its files together, canaryd reads %d MiB at most", path, mostRead>>20)
}

// A file is what was read from one.
type file struct {
	name string
	data []byte
}

// readAll reads a file, or the wanted files of a folder. kinds are those, for
// people.
func readAll(path string, wanted func(name string) bool, kinds string) ([]file, error) {
	names, err := list(path, wanted, kinds)
	if err != nil {
		return nil, err
	}
	files, bad := make([]file, len(names)), make([]error, len(names))
	left := int64(mostRead)
	for i, name := range names {
		files[i].name = name
		files[i].data, bad[i] = read(name, left)
		left -= int64(len(files[i].data))
	}
	return files, errors.Join(bad...)
}

// list returns path, or the wanted files of the folder that path is, sorted.
func list(path string, wanted func(name string) bool, kinds string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	names, err := within(path, wanted)
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%s: the folder holds no file %s", path, kinds)
	}
	return names, err
}

func within(folder string, wanted func(name string) bool) ([]string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries { // sorted by name
		if wanted(e.Name()) && !e.IsDir() {
			names = append(names, filepath.Join(folder, e.Name()))
		}
	}
	return names, nil
}

// A sight is what a source's files look like without reading them.
type sight struct {
	// places are where a change would change what is read.
	places []place
	// stamp differs when something changed.
	stamp string
}

// A place is a name in a folder. It is watched through the folder: a file that
// is replaced or appears later is another inode.
type place struct {
	folder string
	name   string                 // empty: all that are wanted
	wanted func(name string) bool // nil with a name
}

func (p place) concerns(event string) bool {
	if event == p.folder {
		return true
	}
	folder, name := filepath.Split(event)
	return filepath.Clean(folder) == p.folder && (name == p.name || p.wanted != nil && p.wanted(name))
}

// lookAt looks at a file, or at the wanted files of a folder.
func lookAt(path string, wanted func(name string) bool) sight {
	places, resolved := follow(path)
	info, err := os.Stat(path)
	var s sight
	s.add(places, path, info, err)
	if err != nil || !info.IsDir() {
		return s
	}
	s.places = append(s.places, place{folder: resolved, wanted: wanted})
	names, err := within(path, wanted)
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
		s.add(nil, name, info, err)
	}
	return s
}

func (s *sight) add(places []place, path string, info fs.FileInfo, err error) {
	s.places = append(s.places, places...)
	switch {
	case err != nil:
		s.stamp += err.Error() + "\n"
	case info.IsDir():
		s.stamp += path + "/\n" // what it holds follows
	default:
		s.stamp += path + " " + stampOf(info) + "\n"
	}
}

// stampOf differs for a file that was replaced or written to.
func stampOf(info fs.FileInfo) string {
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Sprint(info.Size(), info.ModTime().UnixNano())
	}
	return fmt.Sprint(s.Dev, s.Ino, s.Mode, s.Size, s.Mtim, s.Ctim)
}

// maxLinks is how many symbolic links are followed, as the kernel does.
const maxLinks = 40

// follow walks a path as the kernel does and returns every place where another
// link, file or folder would make it lead elsewhere: each symbolic link on
// the way and the end. A path that leads nowhere ends at what is missing.
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
