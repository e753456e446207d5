// Package cgroup reads the memory limits of the control groups of this process.
//
// [MemoryLimit] returns the smallest limit, [Limit.HeapLimit] the limit for the Go runtime, and
// [Room] the memory that is still free. An error joins the limits that could not be read; the
// result then counts the others. Any goroutine may call the functions.
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

// A Limit is the smallest memory limit of this process.
type Limit struct {
	Bytes int64  // 0: no limit
	File  string // the file that has it
}

// unlimited is the smallest number that means "no limit" in version 1. There, "no limit" is the
// largest count of pages that fits, 2^63 less a page (cgroup-v1/memory.rst), and depends on the
// page size.
const unlimited = 1 << 62

// A group is a control group with the names of its files.
type group struct {
	path   string // below the machine's root folder
	limits []string
	usage  string
	caches [2]string // lines of memory.stat, including lower groups: the caches of files
}

// groupsOf returns the control groups of this process that may limit memory: its own and its
// visible ancestors, of version 1 and 2. A kernel without control groups has none.
func groupsOf(root fs.FS) (all []group, err error) {
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a kernel without control groups
	}
	if err != nil {
		return nil, fmt.Errorf("reading the control group of this process: %w", err)
	}
	mounts, err := fs.ReadFile(root, "proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("reading where control groups are mounted: %w", err)
	}
	for line := range strings.Lines(string(groups)) {
		// ID:CONTROLLERS:PATH, cgroups(7). The path may have colons.
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		kind, g := "cgroup2", group{limits: []string{"memory.max", "memory.high"}, usage: "memory.current", caches: [2]string{"active_file", "inactive_file"}}
		if f[1] != "" {
			kind = "cgroup"
			g = group{limits: []string{"memory.limit_in_bytes"}, usage: "memory.usage_in_bytes", caches: [2]string{"total_active_file", "total_inactive_file"}}
			if !hasWord(f[1], "memory") {
				continue
			}
		}
		top, below, found := visible(string(mounts), kind, f[2])
		for ; found; below = path.Dir(below) {
			g.path = path.Join(top, below)
			all = append(all, g)
			found = below != "."
		}
	}
	return all, nil
}

// MemoryLimit returns the smallest limit of our control group and its visible ancestors. root is
// the machine's root folder. The error joins the limits that could not be read; the Limit is then
// the smallest of the others.
func MemoryLimit(root fs.FS) (Limit, error) {
	groups, err := groupsOf(root)
	var least Limit
	errs := []error{err}
	for _, g := range groups {
		for _, file := range g.limits {
			l, err := read(root, path.Join(g.path, file))
			errs = append(errs, err)
			if l.Bytes > 0 && (least.Bytes == 0 || l.Bytes < least.Bytes) {
				least = l
			}
		}
	}
	return least, errors.Join(errs...)
}

// Room returns how many bytes more the control groups of this process allow; math.MaxInt64
// without a limit. The cache of files counts as free, because the kernel can give it back. root
// is the machine's root folder. The error joins the failed reads.
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

// used returns the memory that a group uses, less the cache of files, which the kernel can take
// back.
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
		return 0, fmt.Errorf("reading the control group's use of memory: %w", err)
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

// visible returns the mount point of a hierarchy, and our group's path below it. kind is
// cgroup2 or cgroup (version 1). In a container, only its own group may be mounted, or a part
// of the tree without our group; then found is false.
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
			continue // a part of the tree that does not have our group
		}
		return strings.TrimPrefix(unescape(f[4]), "/"), path.Join(".", inside), true
	}
	return "", "", false
}

// read returns the limit in one file; zero if it is unlimited. A group without the file, such
// as the root group, has no limit.
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
		return Limit{}, fmt.Errorf("/%s does not hold a limit of memory: %.40q", name, word)
	case bytes >= unlimited:
		return Limit{}, nil
	}
	return Limit{Bytes: int64(max(bytes, 1)), File: "/" + name}, nil
}

func hasWord(list, word string) bool { return strings.Contains(","+list+",", ","+word+",") }

// unescape decodes the kernel's escapes for blanks and backslashes in mountinfo.
func unescape(name string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(name)
}

// headroom is how many quarters of a limit canaryd's heap may use. The rest is for other memory
// of the group. At 5,000 services iptables-nft-restore takes up to 76 MiB (make bench), and
// netlink's buffers in the kernel count, too. Of the manifest's 448 MiB that leaves 112.
const headroom = 3

// least is the smallest useful heap limit. Below it the garbage collector only wastes processor
// time. With 20,000 rules canaryd has 30 MiB resident, half of that the program itself.
const least = 32 << 20

// HeapLimit returns the memory limit for the Go runtime, which collects garbage more often
// before it grows past the limit. A limit far above the heap changes nothing.
func (l Limit) HeapLimit() int64 { return max(l.Bytes/4*headroom, least) }
