package main

import (
	"archive/tar"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"time"
)

// A treeWriter writes files and folders into a tar archive, with the same bytes each time.
// Everything belongs to root and has the time of the release.
type treeWriter struct {
	tar  *tar.Writer
	when time.Time
	// edit returns the text to write instead of a file's own. It may be nil.
	edit func(name string, text []byte) []byte
}

// add writes everything below dir, in the order of names, with prefix before each name. Links stay
// links, unless follow is set.
func (w treeWriter) add(dir, prefix string, follow bool) error {
	return filepath.WalkDir(dir, func(file string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		name := path.Join(prefix, filepath.ToSlash(inside))
		if name == "." {
			return nil // the archive's own root
		}
		return w.entry(file, name, follow)
	})
}

func (w treeWriter) entry(file, name string, follow bool) error {
	stat := os.Lstat
	if follow {
		stat = os.Stat
	}
	info, err := stat(file)
	if err != nil {
		return err
	}
	header := &tar.Header{Name: name, Mode: mode(info.Mode()), ModTime: w.when, Format: tar.FormatUSTAR}
	switch {
	case info.IsDir():
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
		return w.tar.WriteHeader(header)
	case info.Mode()&fs.ModeSymlink != 0:
		header.Typeflag = tar.TypeSymlink
		if header.Linkname, err = os.Readlink(file); err != nil {
			return err
		}
		return w.tar.WriteHeader(header)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is neither file, folder nor link", file)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if w.edit != nil {
		text = w.edit(name, text)
	}
	header.Typeflag, header.Size = tar.TypeReg, int64(len(text))
	if err := w.tar.WriteHeader(header); err != nil {
		return err
	}
	_, err = w.tar.Write(text)
	return err
}

// mode returns a file's mode under a umask of 022, because the modes of a checkout depend on
// its owner's umask.
func mode(m fs.FileMode) int64 {
	const open, others, executable, readable = 0o1777, 0o022, 0o111, 0o444
	switch {
	case m&fs.ModeSticky != 0:
		return open // a folder like /tmp
	case m&executable != 0:
		return int64(m.Perm()|readable|executable) &^ others
	default:
		return int64(m.Perm()|readable) &^ others
	}
}

// writeTar writes an archive that fill fills.
func writeTar(out io.Writer, when time.Time, edit func(string, []byte) []byte, fill func(treeWriter) error) error {
	w := treeWriter{tar: tar.NewWriter(out), when: when, edit: edit}
	if err := fill(w); err != nil {
		return err
	}
	return w.tar.Close()
}

// writeTarGz is writeTar with gzip, which notes neither name nor time.
func writeTarGz(out io.Writer, when time.Time, edit func(string, []byte) []byte, fill func(treeWriter) error) error {
	zip, err := gzip.NewWriterLevel(out, gzip.DefaultCompression)
	if err != nil {
		return err
	}
	if err := writeTar(zip, when, edit, fill); err != nil {
		return err
	}
	return zip.Close()
}

// toFile makes write fill a new file.
func toFile(path string, write func(io.Writer) error) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if err := write(file); err != nil {
		file.Close()
		return fmt.Errorf("%s: %w", path, err)
	}
	return file.Close()
}
