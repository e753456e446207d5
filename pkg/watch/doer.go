package watch

import (
	"path"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/owners"
)

// A Doer is the process that decided on a write. For the commands iptables and
// nft it is their caller, such as puppet or a script, because each `iptables -D`
// is a process of its own.
type Doer struct {
	PID     uint32
	Start   uint64 // in ticks since boot; 0: it was gone before it could be read
	Comm    string
	Command string
	// Ancestors are the kernel's names of its ancestors, the parent first.
	Ancestors []string
	// Session: it leads a session with a terminal.
	Session bool
}

// Known reports whether the process was read while it lived.
func (d Doer) Known() bool { return d.Start != 0 }

// Is reports whether both are known to be the same process.
func (d Doer) Is(o Doer) bool { return d.Known() && d.PID == o.PID && d.Start == o.Start }

// OneJob reports whether all decisions of the process belong to one job, because it is an agent
// or a script. If it deletes a mark, all its deletions are losses (a purge). Decisions of a
// person's shell, or of a daemon that starts jobs of others, may be unrelated. An owner of
// rules decides for itself.
func (d Doer) OneJob() bool {
	return d.Known() && d.PID > 1 && !d.Session && !readsCommands(d.Comm, d.Command) && !starters.have(d.Comm) && !owners.Decides(d.Comm)
}

// Commands reports whether the process is a shell or an agent that executes the commands of a
// person or a script. No owner of rules is one. The judge of native tables then takes an nft
// that it started for a stranger's: a chain that nft emptied is a loss, and a deletion by name
// is a decision.
func (d Doer) Commands() bool {
	program, _, _ := strings.Cut(d.Command, " ") // for a script that names its shell: the shell
	shell := slices.Contains(shells, d.Comm) || slices.Contains(shells, strings.TrimPrefix(path.Base(program), "-"))
	return d.Known() && !owners.Decides(d.Comm) && (shell || agents.have(d.Comm))
}

// names are patterns for the kernel's names of processes.
type names []string

// have reports whether a pattern matches the kernel's name of a process.
func (n names) have(comm string) bool {
	return slices.ContainsFunc(n, func(pattern string) bool {
		found, err := path.Match(pattern, comm)
		return err == nil && found
	})
}

var (
	// starters start jobs of others.
	starters = names{
		"systemd*", "init", "(sd-*", "sshd*", "dropbear", "login", "cron", "crond", "anacron", "atd", "tmux*", "screen",
		"containerd*", "dockerd", "conmon*", "crio*", "runc*", "crun", "podman", "kubelet", "tini", "dumb-init", "docker-init", "catatonit",
	}
	// agents execute the commands of a description or a script.
	agents = names{"ansible*", "chef*", "perl*", "puppet*", "python*", "ruby*", "salt*"}
	// wrappers execute a command and make no decision.
	wrappers = []string{"sudo", "env", "timeout", "nice", "ionice", "setpriv", "nsenter", "chroot", "flock", "doas"}
	shells   = []string{"sh", "bash", "dash", "ash", "busybox", "zsh", "ksh", "mksh", "fish", "csh", "tcsh"}
)

// readsCommands reports whether a process is a shell without a script: it reads commands from a
// person or another program. Then its commands are not one job.
func readsCommands(comm, command string) bool {
	if !slices.Contains(shells, comm) {
		return false
	}
	for i, w := range strings.Fields(command) {
		if i > 0 && !strings.HasPrefix(w, "-") && !slices.Contains(shells, w) {
			return false
		}
	}
	return true
}

// Doer returns the process behind a write: the writer itself if the doer is unknown. The search
// for flushers and purges compares these.
func (w Writer) Doer() Doer {
	if w.By.PID == 0 {
		return Doer{PID: w.PID, Comm: w.Comm, Command: w.Command, Ancestors: w.Origin.Ancestors}
	}
	return w.By
}

// IsOrChildOf reports whether the process or its parent has one of the names that is accepts. A
// job of an agent may have an owner of rules among its further ancestors.
func (w Writer) IsOrChildOf(is func(comm string) bool) bool {
	return is(w.Comm) || len(w.Origin.Ancestors) > 0 && is(w.Origin.Ancestors[0])
}

// OfDoer returns the writer for a flush record that names its doer, with the
// doer's number, name, command line and ancestors.
func (w Writer) OfDoer(d Doer) Writer {
	w.PID, w.Comm, w.Command, w.Origin.Ancestors = d.PID, d.Comm, d.Command, d.Ancestors
	return w
}

// onlyExecutes reports whether a process carries out its parent's decision. Then ancestorsOf
// looks for the doer further up.
func onlyExecutes(comm, command string) bool {
	for _, program := range []string{"iptables", "ip6tables", "xtables-"} {
		if strings.HasPrefix(comm, program) {
			return true
		}
	}
	if comm == "nft" || slices.Contains(wrappers, comm) {
		return true
	}
	// A program started this shell for one command.
	if !slices.Contains(shells, comm) {
		return false
	}
	_, line, found := strings.Cut(command, " -c ")
	program, _, _ := strings.Cut(line, " ")
	return found && !strings.ContainsAny(line, ";|&\n") && onlyExecutes(path.Base(program), "")
}

// maxLineage bounds how many ancestors are read. Ansible executes iptables
// through a shell, Python, a shell, sudo and another shell.
const maxLineage = 8

// ancestorsOf names a process's ancestors, and returns the process that decided on its action.
// That is the first process upwards that does more than carry out its parent's decision. A
// parent younger than its child is another process, which got the number of a process that
// ended. child is the stat file of self.
func ancestorsOf(proc string, self Doer, child procStat) (names []string, by Doer) {
	by, at := self, 0
	upwards := onlyExecutes(self.Comm, self.Command)
	for level := 1; child.parent > 1 && (len(names) < maxAncestors || upwards && level <= maxLineage); level++ {
		dir, err := openProcess(proc, child.parent)
		if err != nil {
			break
		}
		parent, ok := readStat(dir)
		if ok = ok && parent.start <= child.start; ok && upwards {
			by, at = parent.doer(child.parent, dir.command()), level
			upwards = onlyExecutes(by.Comm, by.Command)
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
	if upwards {
		by.Start = 0 // its parent was unreadable, or has ended, or is PID 1
	}
	by.Ancestors = names[min(at, len(names)):]
	return names, by
}

// doer returns the file's process.
func (s procStat) doer(pid uint32, command string) Doer {
	return Doer{PID: pid, Start: s.start, Comm: s.comm, Command: command, Session: s.session == pid && s.terminal}
}
