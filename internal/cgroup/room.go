package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
)

// Room returns how many bytes more the control groups of this process allow, math.MaxInt64 without
// a limit. What the kernel can give back, the cache of files, counts as free. root is the machine's
// root folder. The error joins what could not be read.
func Room(root fs.FS) (int64, error) {
	groups, err := groupsOf(root)
	room, errs := int64(math.MaxInt64), []error{err}
	for _, g := range groups {
		for _, file := range g.limits {
			l, err := read(root, path.Join(g.path, file))
			errs = append(errs, err)
			if l.Bytes == 0 {
				continue
			}
			used, err := used(root, g)
			if errs = append(errs, err); err == nil {
				room = min(room, l.Bytes-used)
			}
		}
	}
	return room, errors.Join(errs...)
}

// used returns how much memory a group uses, less the cache of files.
func used(root fs.FS, g group) (int64, error) {
	text, err := fs.ReadFile(root, path.Join(g.path, g.usage))
	if err != nil {
		return 0, fmt.Errorf("reading how much memory the control group uses: %w", err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("/%s holds no number: %w", path.Join(g.path, g.usage), err)
	}
	stat, err := fs.ReadFile(root, path.Join(g.path, "memory.stat"))
	if err != nil {
		return 0, fmt.Errorf("reading what memory the control group uses: %w", err)
	}
	for line := range strings.Lines(string(stat)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name != g.caches[0] && name != g.caches[1] {
			continue
		}
		if cache, err := strconv.ParseInt(value, 10, 64); err == nil {
			n -= cache
		}
	}
	return n, nil
}
