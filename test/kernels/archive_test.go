package kernels

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// An archive is a cpio archive for the kernel's first root: "newc" of
// Documentation/driver-api/early-userspace/buffer-format.rst.
type archive struct {
	w     *bufio.Writer
	added map[string]bool
}

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriter(w), added: map[string]bool{}}
}

// addFolder adds a folder's content. If two folders have a file of one name, the first counts.
func (a *archive) addFolder(folder string) error {
	return filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err != nil || name == "." || a.added[name] {
			return err
		}
		a.added[name] = true
		info, err := d.Info()
		if err != nil {
			return err
		}
		var content []byte
		switch info.Mode().Type() {
		case 0:
			content, err = os.ReadFile(path)
		case fs.ModeSymlink:
			var to string
			to, err = os.Readlink(path)
			content = []byte(to)
		case fs.ModeDir:
		default:
			return nil // a device or a socket, which devtmpfs has
		}
		if err != nil {
			return err
		}
		return a.add(name, info.Sys().(*syscall.Stat_t).Mode, content)
	})
}

// add adds a file, a folder or a link.
func (a *archive) add(name string, mode uint32, content []byte) error {
	_, err := fmt.Fprintf(a.w, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		len(a.added), mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0, name)
	if err != nil {
		return err
	}
	const head = 110
	if err := a.pad(head + len(name) + 1); err != nil {
		return err
	}
	if _, err := a.w.Write(content); err != nil {
		return err
	}
	return a.pad(len(content))
}

// pad fills up to a multiple of four bytes.
func (a *archive) pad(written int) error {
	_, err := a.w.Write(make([]byte, (4-written%4)%4))
	return err
}

// close writes the archive's end.
func (a *archive) close() error {
	if err := a.add("TRAILER!!!", 0, nil); err != nil {
		return err
	}
	return a.w.Flush()
}
