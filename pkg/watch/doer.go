package watch

import (
	"path"
	"slices"
	"strings"
)

// A Doer is the process that decided on a write. For iptables and nft as commands it is the process
// that executed them, such as puppet or a script: each `iptables -D` is a process of its own.
type Doer struct {
	PID     uint32
	Start   uint64 // in ticks since the machine started; 0: it was gone before it could be read
	Comm    string
	Command string
	Program Program
	// Ancestors are what the kernel calls them, the parent first.
	Ancestors []string
	Lineage   []Lineal // its ancestors without those that start other people's processes, too
}

// A Lineal is an ancestor.
type Lineal struct {
	PID   uint32
	Start uint64
}

// Known reports whether the process was read while it lived.
func (d Doer) Known() bool { return d.Start != 0 }

// Is reports whether both are the same process. One that was gone before it could be read is the
// same if its number and name are.
func (d Doer) Is(o Doer) bool {
	return d.PID != 0 && d.PID == o.PID && (d.Start == o.Start || !d.Known() && !o.Known() && d.Comm == o.Comm)
}

// Kin reports whether both are one process, or one is an ancestor of the other, or both share one.
// The services that PID 1 starts, such as sshd, cron and containerd, are no such ancestors.
func (d Doer) Kin(o Doer) bool {
	if d.Is(o) {
		return true
	}
	if !d.Known() || !o.Known() {
		return false
	}
	family := append(slices.Clone(d.Lineage), Lineal{d.PID, d.Start})
	return slices.ContainsFunc(append(slices.Clone(o.Lineage), Lineal{o.PID, o.Start}), func(l Lineal) bool {
		return slices.Contains(family, l)
	})
}

// Doer returns the process behind a write: the writer itself if nothing more is known.
func (w Writer) Doer() Doer {
	by := w.By
	if by.PID == 0 {
		by = Doer{PID: w.PID, Comm: w.Comm, Command: w.Command, Ancestors: w.Origin.Ancestors}
	}
	by.Program = programOf(w.Comm, w.Command)
	return by
}

// OfDoer returns the writer as a record names it whose doer decided: with the doer's number, name
// and command line.
func (w Writer) OfDoer(d Doer) Writer {
	w.PID, w.Comm, w.Command, w.Origin.Ancestors = d.PID, d.Comm, d.Command, d.Ancestors
	return w
}

// wrappers execute a command and decide nothing.
var wrappers = []string{"sudo", "env", "timeout", "nice", "ionice", "setpriv", "nsenter", "chroot", "flock", "doas"}

// onlyExecutes reports whether a process does what its parent decided.
func onlyExecutes(comm, command string) bool {
	for _, program := range []string{"iptables", "ip6tables", "xtables-"} {
		if strings.HasPrefix(comm, program) {
			return true
		}
	}
	if comm == "nft" || slices.Contains(wrappers, comm) {
		return true
	}
	// A shell that a program started for one command.
	if !slices.Contains([]string{"sh", "bash", "dash"}, comm) {
		return false
	}
	_, line, found := strings.Cut(command, " -c ")
	program, _, _ := strings.Cut(line, " ")
	return found && !strings.ContainsAny(line, ";|&\n") && onlyExecutes(path.Base(program), "")
}

// A Program is what a process executed for a write. It is empty if that is not known.
type Program string

// The programs that write iptables' rules, in all of their names. Others have what the kernel calls
// them.
const (
	OneRule Program = "iptables"         // iptables and ip6tables change one rule or chain at a time
	Restore Program = "iptables-restore" // it loads a file
)

// programOf returns which program that is. The kernel keeps 15 bytes of a name. Of the backends'
// own names these may not show whether it loads a file.
func programOf(comm, command string) Program {
	name := comm
	if line, _, _ := strings.Cut(command, " "); line != "" {
		name = path.Base(line)
	}
	plain := strings.Replace(name, "ip6tables", "iptables", 1)
	switch rest, is := strings.CutPrefix(plain, "iptables"); {
	case !is:
		return Program(comm)
	case strings.Contains(rest, "-re"), rest == "-nft-r":
		return Restore
	case command == "" && strings.HasPrefix(rest, "-legac"):
		return ""
	}
	return OneRule
}

// maxLineage bounds how many ancestors are read. Ansible executes iptables by way of a shell,
// Python, a shell, sudo and another shell, below the connection that all of its tasks share.
const maxLineage = 8

// ancestorsOf names a process's ancestors, and returns the process that decided what it does: the
// first one upwards that not only executes what another decided. A parent that is younger than its
// child is another process that got the number of one that has ended.
func ancestorsOf(proc string, self Doer, child procStat) (names []string, by Doer) {
	by, at := self, 0
	upwards := onlyExecutes(self.Comm, self.Command)
	for level := 1; level <= maxLineage && child.parent > 1; level++ {
		dir, err := openProcess(proc, child.parent)
		if err != nil {
			break
		}
		parent, ok := readStat(dir)
		ok = ok && parent.start <= child.start
		switch {
		case !ok:
		case upwards:
			by = Doer{PID: child.parent, Start: parent.start, Comm: parent.comm, Command: dir.command()}
			at, upwards = level, onlyExecutes(parent.comm, by.Command)
		case parent.parent > 1 && parent.comm != "systemd" && parent.comm != "init":
			by.Lineage = append(by.Lineage, Lineal{child.parent, parent.start})
		}
		dir.close()
		if !ok {
			break
		}
		if len(names) < maxAncestors {
			names = append(names, parent.comm)
		}
		child = parent
	}
	if upwards && (child.parent > 1 || programOf(by.Comm, by.Command) == OneRule) {
		by.Start = 0 // its parent could not be read, or has ended; a file may be a unit's
	}
	by.Ancestors = names[min(at, len(names)):]
	return names, by
}
