// Canaryd notices when a process flushes iptables rules, puts them back, and proves it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/terminal"
)

// Exit codes; the commands' descriptions name them, too.
const (
	exitOK    = 0
	exitNo    = 1 // the answer is no: loss, not proved, not healthy
	exitError = 2 // wrong usage, or an error
)

type command struct {
	name    string
	summary string   // half a line, for the list of commands
	about   string   // some lines, for its own help
	flags   []string // names of its flags; see options.flagSet
	// run returns the exit code. With an error the exit code is exitError, regardless of run's.
	run func(context.Context, *options, streams) (int, error)
}

// streams are the inputs and outputs of a command.
type streams struct {
	out, err io.Writer
	log      *lineWriter                // of the log; nil: the context has a logger
	watched  bool                       // err is a terminal
	in       io.Reader                  // answers questions; nil: it is no terminal
	size     func() (columns, rows int) // of out; nil: it is no terminal
}

// commands returns all commands, in the order of help.
func commands() []command {
	return []command{
		{"run", "watch, and put back flushed rules (the default)", aboutRun, runFlags(), runDaemon},
		{"check", "look once: exit 0 intact, 1 loss, 2 unknown", aboutCheck, lookFlags(), runCheck},
		{"restore", "replay the generation now: exit 0 proved, 1 not proved", aboutRestore, append(lookFlags(), "generation", "dry-run", "yes"), runRestore},
		{"render", "print the generation as iptables-restore input", aboutRender, renderFlags(), runRender},
		{"status", "show the daemon's status: exit 0 healthy, 1 not, 2 no daemon", aboutStatus, []string{"flush", "watch", "socket", "output"}, runStatus},
		{"health", "a probe: does the daemon live, or with ready: is the node healthy", aboutHealth, []string{"socket", "output"}, runHealth},
		{"pause", "pause replays for a while; still detects and counts", aboutPause, []string{"for", "why", "socket", "output"}, runPause},
		{"resume", "end a pause; lost rules are replayed at once", aboutResume, []string{"socket", "output"}, runResume},
		{"dismiss", "accept a loss that waits for a decision", aboutDismiss, []string{"socket", "output"}, runDismiss},
		{"drill", "a game day: take canaryd's own canary; the daemon puts it back", aboutDrill, []string{"table", "kind", "for-real", "yes", "socket", "output"}, runDrill},
		{"baseline", "rules that appeared since an operator confirmed them", aboutBaseline, []string{"confirm", "generation", "forget", "socket", "output"}, runBaseline},
		{"detect", "which backend is in use, and the evidence for it", aboutDetect, []string{"protect", "backend", "ip-family", "canary-chain", "output"}, runDetect},
		{"cleanup", "remove the canaries; with --rules the protected rules too", aboutCleanup, append(lookFlags(), "rules", "stay"), runCleanup},
		{"completion", "make a shell complete canaryd's command lines", aboutCompletion, nil, runCompletion},
		{"version", "print the version", "", []string{"output"}, runVersion},
		{"man", "print canaryd(8), the manual page", "", nil, runManual},
	}
}

// hidden reports whether help leaves the command out.
func (c command) hidden() bool { return c.name == "man" }

// slow reports whether a command may take more than a second with tens of thousands of rules.
func (c command) slow() bool {
	return slices.Contains([]string{"check", "restore", "render", "detect", "cleanup"}, c.name)
}

// words returns the words that may follow a command. At most one is given; the first is the
// default.
func (c command) words() []string {
	return map[string][]string{"completion": {"bash", "zsh", "fish"}, "health": {"live", "ready"}}[c.name]
}

const (
	aboutCompletion = `Prints a script for bash, or for the shell that is named behind it: bash, zsh or fish.
bash: source <(canaryd completion); zsh: into a folder of fpath as _canaryd; fish: into
~/.config/fish/completions/canaryd.fish. Packages bring all three.
`
	// aboutRun is in the manual only; the help of run lists the commands instead.
	aboutRun = `With --source=manifest it takes the generator's flags, which are those of render, too.
`
	aboutCheck = `Makes the running daemon look now. Without a daemon it compares the kernel's rules with the last
daemon's stored rules, native tables too. Prints a row per family and table, and writes nothing.
With -o line it is a plugin of node-problem-detector: it prints a problem or trouble as one short
line.
Exit code: 0 intact or changed by its owner, 1 loss, or rules that could not be put back or are
refused, 2 unknown or trouble.
`
	aboutRestore = `Puts the generation back: through the running daemon, or without a daemon the generation that the
last daemon stored. With --generation it makes the protected rules, or a native table, exactly those
of a stored generation; canaryd status lists the stored generations. Without --yes it removes no
protected rule, and counts the rules that it would remove.
Exit code: 0 proved to be in force, 1 not proved, 2 trouble, or --yes is needed.
`
	aboutRender = `Prints the running daemon's generation; without a daemon the stored one, else the kernel's rules.
With --source=manifest it prints the generator's rules for --manifest, and needs no kernel. The
output loads into empty tables: canaryd render | iptables-restore. With --check it only tries each
declared rule in a chain that nothing jumps to, and names the rules that the kernel refuses. Needs
root. Exit code then: 0 all are taken, 1 some are refused, 2 broken file or trouble.
With --generation of a native table it prints the table in nft's words, for people only.
`
	aboutStatus = `Lists the last flushes, also of earlier runs. With --flush it shows one flush in full: the processes
that wrote meanwhile, with command lines, and the lost rules, as a diff in the words of
iptables-save or nft. With --watch it shows verdicts and flushes as they happen, until Ctrl-C: a
screen on a terminal, else a line for each change. With -o json each line is JSON with the last 10
flushes. --watch waits for a daemon that does not run yet.
Exit code: 0 healthy, 1 not healthy, 2 no daemon or trouble; with --flush 0, 1 no such flush, 2;
with --watch 0 after Ctrl-C, 2 trouble.
`
	aboutHealth = `For probes, through the control socket, which connections of other users cannot fill up.
Prints ok or the problem, in one line. live is the default; it says nothing of losses.
Exit code: 0 ok, 1 not, 2 no daemon or trouble.
`
	aboutPause = `For planned work on the rules. The daemon detects and counts as before and is not ready; when
the time is over it replays rules that are still lost. A second pause replaces the first. A pause
survives a restart of the daemon. Status, page and log show the user, the beginning, the end and,
with --why, the reason.
`
	aboutResume = `Exit code: 0 also if there was no pause, 2 no daemon or trouble.
`
	aboutCleanup = `Removes canaries and witnesses; with --rules also the protected chains and the jumps into them, with
--protect only the chains that it names (kube-proxy: kube without kubelet's). Where canaryd runs
with --protect=auto, --rules needs --protect: auto is all of it. A running daemon does the cleanup
itself, and watches nothing until a restart. It also deletes its tables canaryd-keeper and
canaryd-standby, which else vanish with its process, and on nft the empty tables that canaryd had
made. With --stay it then waits for SIGTERM, as the container of a DaemonSet's pod has to.
`
)

// main runs canaryd's command line until it ends, or until SIGINT or SIGTERM ends ctx.
func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	to := streams{out: terminal.OnScreen(os.Stdout, os.Getenv), err: os.Stderr, log: openLines(os.Stderr), watched: terminal.Is(os.Stderr, os.Getenv)}
	if terminal.Is(os.Stdout, os.Getenv) {
		to.size = sizeOf(os.Stdout)
	}
	if terminal.Is(os.Stdin, os.Getenv) {
		to.in = os.Stdin
	}
	code := run(ctx, os.Args[1:], to)
	stop()
	os.Exit(code)
}

// run runs one command line and returns its exit code. An error is one line on the error stream.
func run(ctx context.Context, args []string, to streams) int {
	cmd, rest, err := choose(args)
	if err != nil {
		return fail(to, err)
	}
	o := &options{}
	flags := o.flagSet(cmd)
	flags.SetOutput(io.Discard)
	flags.Usage = func() {}
	switch err := flags.Parse(rest); {
	case errors.Is(err, pflag.ErrHelp):
		help(to.out, cmd, flags)
		return exitOK
	case err != nil:
		return fail(to, fmt.Errorf("%w (see canaryd %s --help)", err, cmd.name))
	case flags.NArg() > 0 && len(cmd.words()) == 0 || flags.NArg() > 1:
		return fail(to, fmt.Errorf("%q is one word too many (see canaryd %s --help)", flags.Arg(flags.NArg()-1), cmd.name))
	}
	o.oneFlush, o.protectGiven = flags.Changed("flush"), flags.Changed("protect")
	if words := cmd.words(); len(words) > 0 {
		if o.word = flags.Arg(0); o.word == "" {
			o.word = words[0]
		}
		if !slices.Contains(words, o.word) {
			return fail(to, fmt.Errorf("there is no %s for %q: want %s", cmd.name, o.word, strings.Join(words, " or ")))
		}
	}
	if err := o.complete(cmd, flags); err != nil {
		return fail(to, err)
	}
	if to.log != nil {
		ctx = klog.NewContext(ctx, o.logger(flags, to.log))
	}
	if cmd.slow() && to.watched {
		done := atWork(ctx, to.err, cmd.name)
		defer done()
		to = to.behind(done)
	}
	code, err := cmd.run(ctx, o, to)
	if errors.Is(err, control.ErrForbidden) {
		err = fmt.Errorf("%w: sudo canaryd %s", err, cmd.name)
	}
	if err != nil {
		return fail(to, err)
	}
	return code
}

// choose returns the command of a command line, and the words after it. Without a command it is
// "run". "help" becomes run --help, and --version the command version.
func choose(args []string) (command, []string, error) {
	name, rest := "run", args
	if len(args) > 0 && args[0] != "" && args[0][0] != '-' {
		name, rest = args[0], args[1:]
	}
	if name == "help" {
		name, rest = "run", []string{"--help"}
	}
	if name == "run" && len(rest) > 0 && rest[0] == "--version" {
		name, rest = "version", rest[1:]
	}
	all := commands()
	if i := slices.IndexFunc(all, func(c command) bool { return c.name == name }); i >= 0 {
		return all[i], rest, nil
	}
	return command{}, nil, fmt.Errorf("there is no command %q (see canaryd --help)", name)
}

func fail(to streams, err error) int {
	_, _ = fmt.Fprintln(to.err, "canaryd:", plain(oneLine(err.Error())))
	return exitError
}

// rareFlags are the flags of run that its help omits, so that it fits a screen.
var rareFlags = []string{"log-format", "replay", "canary-chain", "poll-interval", "drill-every", "lock-file", "lock-wait", "metrics-host", "metrics-required", "max-rules", "cni-results", "standby"}

const helpWidth = 100

// help prints a command's description. For run, the default command, it also lists all others.
func help(w io.Writer, cmd command, flags *pflag.FlagSet) {
	if cmd.name == "run" {
		_, _ = fmt.Fprint(w, "canaryd notices when a process flushes iptables rules, puts them back, and proves it.\n\nUsage: canaryd [COMMAND] [FLAGS]\n\n")
		for _, c := range commands() {
			if !c.hidden() {
				_, _ = fmt.Fprintf(w, "  %-10s %s\n", c.name, c.summary)
			}
		}
		_, _ = fmt.Fprint(w, "\ncanaryd COMMAND --help says more. With --source=manifest run takes render's flags, too. Its own,\nbut for rare ones, which the manual has (canaryd man):\n\n")
		for _, name := range rareFlags {
			flags.Lookup(name).Hidden = true
		}
	} else {
		_, _ = fmt.Fprintf(w, "canaryd %s: %s\n%s\n", cmd.name, cmd.summary, cmd.about)
	}
	_, _ = fmt.Fprint(w, flags.FlagUsagesWrapped(helpWidth))
}
