// Package cgroup says how much memory the control groups of this process allow.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// A Limit is the smallest limit of memory that holds for this process.
type Limit struct {
	Bytes int64  // 0: there is none
	File  string // where it stands
}

// unlimited is what version 1 has for no limit, cgroup-v1/memory.rst: the largest count of
// pages that fits, 2^63 less a page. Nothing of that size is a limit.
const unlimited = 1 << 62

// MemoryLimit returns the smallest limit of our control group and its ancestors, as far as they
// are visible. root is the machine's root folder. An error is a limit that could not be read,
// and comes with the smallest of the others.
func MemoryLimit(root fs.FS) (Limit, error) {
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if errors.Is(err, fs.ErrNotExist) {
		return Limit{}, nil // a kernel without control groups
	}
	if err != nil {
		return Limit{}, fmt.Errorf("looking for our control group: %w", err)
	}
	mounts, err := fs.ReadFile(root, "proc/self/mountinfo")
	if err != nil {
		return Limit{}, fmt.Errorf("looking for the folder of control groups: %w", err)
	}
	var least Limit
	var errs []error
	for line := range strings.Lines(string(groups)) {
		// ID:CONTROLLERS:PATH, cgroups(7). The path may have colons.
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		kind, files := "cgroup2", []string{"memory.max", "memory.high"}
		if f[1] != "" {
			kind, files = "cgroup", []string{"memory.limit_in_bytes"}
			if !hasWord(f[1], "memory") {
				continue
			}
		}
		top, below, found := visible(string(mounts), kind, f[2])
		if !found {
			continue
		}
		for {
			for _, file := range files {
				l, err := read(root, path.Join(top, below, file))
				if err != nil {
					errs = append(errs, err)
				}
				if l.Bytes > 0 && (least.Bytes == 0 || l.Bytes < least.Bytes) {
					least = l
				}
			}
			if below == "." {
				break
			}
			below = path.Dir(below)
		}
	}
	return least, errors.Join(errs...)
}

// visible returns the mount point of a hierarchy, and our group's path below it. A container
// may have only its own group mounted, or a root that is not ours.
func visible(mounts, kind, group string) (top, below string, found bool) {
	for line := range strings.Lines(mounts) {
		// ID PARENT DEVICE ROOT POINT OPTIONS [MORE] - TYPE SOURCE OPTIONS, proc_pid_mountinfo(5)
		before, after, _ := strings.Cut(line, " - ")
		f, last := strings.Fields(before), strings.Fields(after)
		if len(f) < 6 || len(last) < 3 || last[0] != kind || kind == "cgroup" && !hasWord(last[2], "memory") {
			continue
		}
		inside, ok := strings.CutPrefix(group, strings.TrimSuffix(unescape(f[3]), "/"))
		if !ok || inside != "" && inside[0] != '/' || strings.Contains(group+"/", "/../") {
			continue // another part of the tree than ours
		}
		return strings.TrimPrefix(unescape(f[4]), "/"), path.Join(".", inside), true
	}
	return "", "", false
}

// read returns the limit of one file; a group without the file, such as the topmost, has none.
func read(root fs.FS, name string) (Limit, error) {
	text, err := fs.ReadFile(root, name)
	if errors.Is(err, fs.ErrNotExist) {
		return Limit{}, nil
	}
	if err != nil {
		return Limit{}, fmt.Errorf("reading a limit of memory: %w", err)
	}
	word := strings.TrimSpace(string(text))
	if word == "max" {
		return Limit{}, nil
	}
	bytes, err := strconv.ParseUint(word, 10, 64)
	switch {
	case err != nil:
		return Limit{}, fmt.Errorf("/%s is no limit of memory: %.40q", name, word)
	case bytes >= unlimited:
		return Limit{}, nil
	}
	return Limit{Bytes: int64(max(bytes, 1)), File: "/" + name}, nil
}

func hasWord(list, word string) bool { return strings.Contains(","+list+",", ","+word+",") }

// unescape undoes how the kernel writes blanks and backslashes in mountinfo.
func unescape(name string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(name)
}

// headroom are the parts of four that canaryd's heap may have of a limit; the rest is for what
// runs in the same group: at 5,000 services iptables-nft-restore takes up to 76 MiB (make bench),
// and the kernel's buffers of netlink count as well. Of the manifest's 448 MiB that leaves 112.
const headroom = 3

// least is the smallest heap limit that helps: below it the collector only burns time. At 20,000
// rules canaryd has 30 MiB resident, of which its program is the half.
const least = 32 << 20

// HeapLimit is what the Go runtime is to keep to, of a limit of memory. The runtime collects
// more often before it grows past that; a limit that is far away changes nothing.
func (l Limit) HeapLimit() int64 { return max(l.Bytes/4*headroom, least) }
