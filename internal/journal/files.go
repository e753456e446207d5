package journal

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/canaryd/canaryd/internal/private"
)

const (
	// maxFile is the size at which a new file is begun. One old file is kept.
	maxFile = 4 << 20
	// maxLine bounds an entry. A longer entry is neither written nor read.
	maxLine = 256 << 10
)

// errOversize means that an entry is too long even without its detail.
var errOversize = errors.New("an entry is too long for the journal")

// write appends entries. It returns the entries that are not on disk, with the reason; Run
// tries them again. It does not sync, because a crash of the machine also ends the boot that
// the entries are about.
func (j *Journal) write(entries []Entry) ([]Entry, error) {
	var oversize error
	for i, e := range entries {
		line, err := e.line()
		if errors.Is(err, errOversize) {
			oversize = fmt.Errorf("flush %s: %w", e.ID, err)
			continue // it would be too long the next time too
		}
		if err == nil {
			err = j.append(line)
		}
		if err != nil {
			return entries[i:], fmt.Errorf("writing the journal: %w", err)
		}
	}
	return nil, oversize
}

// line returns the entry as a line, without its detail if the line would be too long.
func (e Entry) line() ([]byte, error) {
	for {
		var text bytes.Buffer
		encoder := json.NewEncoder(&text)
		encoder.SetEscapeHTML(false) // people read it, and rules have < and >
		if err := encoder.Encode(e); err != nil {
			return nil, err
		}
		if text.Len() <= maxLine {
			return text.Bytes(), nil
		}
		if e.Detail == nil {
			return nil, errOversize
		}
		e.Detail = nil
	}
}

// create creates the file if it does not exist, because a program that follows it, such as
// node-problem-detector, needs it. It reports no error, because the next write will.
func (j *Journal) create() {
	if file, _, err := open(j.path, os.O_RDWR|os.O_CREATE); err == nil {
		_ = file.Close() // nothing was written
	}
}

// append writes one line, into a new file if this one is full. It removes a partly written
// line, because a full disk needs the room.
func (j *Journal) append(line []byte) error {
	file, size, err := open(j.path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return err
	}
	defer file.Close()
	if size > 0 && size+int64(len(line)) > j.room {
		if err := os.Rename(j.path, j.old); err != nil {
			return err
		}
		_ = file.Close()
		if file, size, err = open(j.path, os.O_RDWR|os.O_CREATE); err != nil {
			return err
		}
		defer file.Close()
	}
	if err := file.Chmod(0o600); err != nil {
		return err
	}
	last := []byte{'\n'}
	if size > 0 {
		if _, err := file.ReadAt(last, size-1); err != nil {
			return err
		}
	}
	if last[0] != '\n' { // a crash cut the last line off; read skips it
		line = append([]byte{'\n'}, line...)
	}
	if _, err := file.WriteAt(line, size); err != nil {
		return errors.Join(err, file.Truncate(size))
	}
	return nil
}

// open opens a file of the journal for reading or writing (flag), and returns its size.
func open(path string, flag int) (*os.File, int64, error) {
	file, err := private.Open(path, flag)
	if err != nil {
		return nil, 0, err
	}
	info, err := file.Stat()
	if err != nil {
		_ = file.Close() // the first error is the one to report
		return nil, 0, err
	}
	return file, info.Size(), nil
}

// read calls each for every entry on disk, oldest first. If mention is not empty, it skips
// lines without that text, which saves decoding them. It skips lines that are not entries. If
// one file cannot be read, it still reads the other one.
func (j *Journal) read(mention string, each func(Entry)) error {
	var errs []error
	for _, path := range []string{j.old, j.path} {
		if err := readFile(path, mention, each); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("reading the journal: %w", err))
		}
	}
	return errors.Join(errs...)
}

// readFile is read for one file. A missing file is an error, fs.ErrNotExist.
func readFile(path, mention string, each func(Entry)) error {
	file, size, err := open(path, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer file.Close()
	// The journal's own files are never longer. For any other file, the end is enough.
	if _, err := file.Seek(max(size-maxFile, 0), io.SeekStart); err != nil {
		return err
	}
	return readLines(io.LimitReader(file, maxFile), func(line []byte) {
		if !bytes.Contains(line, []byte(mention)) {
			return
		}
		if e, ok := parse(line); ok {
			each(e)
		}
	})
}

// readLines calls each for every line that is not too long. The line is valid until each returns.
func readLines(r io.Reader, each func(line []byte)) error {
	lines := bufio.NewReaderSize(r, maxLine)
	skip := false
	for {
		line, err := lines.ReadSlice('\n')
		full := errors.Is(err, bufio.ErrBufferFull)
		if !skip && !full {
			each(line)
		}
		skip = full
		if err != nil && !full {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// parse reads a line. The Entry shares no memory with it.
func parse(line []byte) (Entry, bool) {
	var e Entry
	err := json.Unmarshal(line, &e)
	return e, err == nil && isID(e.ID) && len(e.Record) > 0
}

func isID(id string) bool {
	return strings.Trim(id, "0123456789abcdef") == "" && 0 < len(id) && len(id) <= 16
}
