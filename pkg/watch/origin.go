package watch

import (
	"regexp"
	"strconv"
	"strings"
)

// An Origin is a process's ancestors, and its unit or container. All of it is
// printable and bounded, because others choose these names.
type Origin struct {
	Ancestors []string // the kernel's names, the parent first; without PID 1
	Unit      string   // of systemd, such as cron.service; for a container the unit around it
	Container Container
}

// A Container is a container according to its cgroup's path.
type Container struct {
	ID   string // 64 hexadecimal digits; may be empty if there is a Name
	Pod  string // its pod's UID; empty outside of Kubernetes
	Name string // of a machine or an LXC container; the path of others has none
}

const (
	maxAncestors = 3
	maxName      = 64      // bytes of a unit's or container's name, escapes included
	maxStat      = 1 << 10 // bytes of a stat file to read,
	maxCgroup    = 8 << 10 // and of a cgroup file: 13 lines on cgroup v1
)

// A procStat is the content of a process's stat file.
type procStat struct {
	comm     string
	parent   uint32
	session  uint32 // its leader's number
	terminal bool   // it has a controlling terminal
	start    uint64 // in ticks since boot
}

// readStat reads "12 (a name) S 1 ...". The name may contain any byte. If ok is false, the
// process is gone or the file damaged; only the parent may be known.
func readStat(dir processFolder) (s procStat, ok bool) {
	text := string(dir.read("stat", maxStat))
	from, to := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if from < 0 || to < from {
		return procStat{}, false
	}
	fields := strings.Fields(text[to+1:])
	const parent, session, terminal, start = 1, 3, 4, 19 // fields 4, 6, 7 and 22 of proc(5)
	if len(fields) <= parent {
		return procStat{}, false
	}
	ppid, err := strconv.ParseUint(fields[parent], 10, 32)
	if err != nil || len(fields) <= start {
		return procStat{parent: uint32(ppid)}, false
	}
	s = procStat{comm: printable([]byte(bounded(text[from+1:to], maxComm)), maxName), parent: uint32(ppid)}
	if leader, err := strconv.ParseUint(fields[session], 10, 32); err == nil {
		s.session, s.terminal = uint32(leader), fields[terminal] != "0"
	}
	s.start, err = strconv.ParseUint(fields[start], 10, 64)
	return s, err == nil
}

var (
	// podPart is kubelet's: pod1234-... by its cgroupfs driver,
	// kubepods-burstable-pod1234_....slice by systemd's. A static pod's UID has
	// no hyphens.
	podPart = regexp.MustCompile(`^(?:kubepods-(?:[a-z]+-)?)?pod([0-9a-f]{32}|[0-9a-f]{8}(?:[_-][0-9a-f]{4}){3}[_-][0-9a-f]{12})(?:\.slice)?$`)
	// containerPart is 0123..., docker-0123....scope, cri-containerd-0123....scope, and the like.
	containerPart = regexp.MustCompile(`^(?:[a-z][a-z-]*-)?([0-9a-f]{64})(?:\.scope)?$`)
	// machinePart is a name by systemd-machined or LXC.
	machinePart = regexp.MustCompile(`^(?:machine-(.+)\.scope|systemd-nspawn@(.+)\.service|lxc\.payload\.(.+))$`)
)

// placeOf returns the unit and the container in the text of a cgroup file. It prefers systemd's
// hierarchies. The zero Origin means that none is known.
func placeOf(text string) Origin {
	var preferred, others []string
	for line := range strings.Lines(text) {
		hierarchy := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		switch {
		case len(hierarchy) < 3:
		case hierarchy[1] == "" || hierarchy[1] == "name=systemd":
			preferred = append(preferred, hierarchy[2])
		default:
			others = append(others, hierarchy[2])
		}
	}
	for _, path := range append(preferred, others...) {
		if o := placeInPath(path); o.Unit != "" || o.Container != (Container{}) {
			return o
		}
	}
	return Origin{}
}

// placeInPath reads a cgroup's path from its root on, up to a container; the zero Origin if it
// names none. A container's or unit's own processes name the rest, which therefore proves
// nothing.
func placeInPath(path string) Origin {
	var o Origin
	// containerd without systemd's driver: kubepods-pod....slice:cri-containerd:0123...
	parts := strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == ':' })
	for i, part := range parts {
		switch pod, id, machine := podPart.FindStringSubmatch(part), containerPart.FindStringSubmatch(part), machinePart.FindStringSubmatch(part); {
		case pod != nil && o.Container.Pod == "":
			o.Container.Pod = strings.ReplaceAll(pod[1], "_", "-")
		case id != nil && !strings.Contains(part, "conmon"): // conmon runs outside its container
			o.Container.ID = id[1]
			return o
		case machine != nil && o.Unit == "":
			o.Container.Name = name(machine[1] + machine[2] + machine[3])
			return o
		case part == "lxc" && i+1 < len(parts) && o.Unit == "":
			o.Container.Name = name(parts[i+1])
			return o
		case o.Unit == "" && part != "init.scope" && (strings.HasSuffix(part, ".service") || strings.HasSuffix(part, ".scope")):
			o.Unit = name(part)
		}
	}
	return o
}

func name(text string) string { return printable([]byte(text), maxName) }

// String returns the unit and container in a few words for logs and records; "" if nothing is
// known. Examples are "cron.service" and "container 0123456789ab of pod 8d...".
func (o Origin) String() string {
	c := o.Container
	var words []string
	switch {
	case c.Name != "":
		words = append(words, "container "+c.Name)
	case c.ID != "":
		words = append(words, "container "+c.ID[:min(len(c.ID), 12)])
	}
	if c.Pod != "" {
		words = append(words, "pod "+c.Pod)
	}
	text := strings.Join(words, " of ")
	if text != "" && o.Unit != "" {
		text += " in "
	}
	return text + o.Unit
}
