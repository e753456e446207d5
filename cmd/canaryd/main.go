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
	// run returns the exit code. With an error that is exitError, whatever run returns.
	run func(context.Context, *options, streams) (int, error)
}

// streams are what a command writes to.
type streams struct {
	out, err io.Writer
	log      *lineWriter                // of the log; nil: the context has a logger
	watched  bool                       // err is a terminal
	in       io.Reader                  // where questions are answered; nil: it is no terminal
	size     func() (columns, rows int) // of out; nil: it is no terminal
}

// commands returns all commands, in the order of help.
func commands() []command {
	return []command{
		{"run", "watch, and put back what is flushed (the default)", aboutRun, runFlags(), runDaemon},
		{"check", "look once: exit 0 intact, 1 loss, 2 unknown", aboutCheck, lookFlags(), runCheck},
		{"restore", "replay the generation now: exit 0 proved, 1 not proved", aboutRestore, append(lookFlags(), "generation", "dry-run", "yes"), runRestore},
		{"render", "print the generation as iptables-restore input", aboutRender, renderFlags(), runRender},
		{"status", "what the running daemon knows: exit 0 healthy, 1 not, 2 no daemon", aboutStatus, []string{"flush", "watch", "socket", "output"}, runStatus},
		{"health", "a probe: does the daemon live, or with ready: is the node healthy", aboutHealth, []string{"socket", "output"}, runHealth},
		{"pause", "pause replays for a while; still detects and counts", aboutPause, []string{"for", "why", "socket", "output"}, runPause},
		{"resume", "end a pause; what is lost is replayed at once", aboutResume, []string{"socket", "output"}, runResume},
		{"dismiss", "accept a loss that waits for a decision", aboutDismiss, []string{"socket", "output"}, runDismiss},
		{"drill", "a game day: take canaryd's own canary, and see it come back", aboutDrill, []string{"table", "kind", "for-real", "yes", "socket", "output"}, runDrill},
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

// words returns the words that may follow a command. One at most is given; the first is the
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
	aboutCheck = `Asks the running daemon to look now. Without one it reads the kernel and compares with what the
last daemon stored, native tables too. Prints a row per family and table, and writes nothing. With
-o line it is a plugin of node-problem-detector: what is wrong, and also trouble, is one short line.
Exit code: 0 intact or changed by its owner, 1 loss, or rules that could not be put back or are
refused, 2 unknown or trouble.
`
	aboutRestore = `Puts the generation back: through the running daemon, or without one from what the last daemon
stored. With --generation it makes the protected rules exactly those of a stored generation, which
canaryd status lists, or a native table what one of its own has. It removes no protected rule
without --yes, and prints what it would remove.
Exit code: 0 proved to be in force, 1 not proved, 2 trouble, or --yes is needed.
`
	aboutRender = `Prints the running daemon's generation, without one the stored one, without that what the kernel
holds now; with --source=manifest what the generator makes of --manifest, which needs no kernel.
It loads into empty tables: canaryd render | iptables-restore. With --check it prints no rules: it
tries each that files declare in a chain that nothing jumps to, and names those that the kernel
refuses. Needs root. Exit code then: 0 all are taken, 1 some are refused, 2 broken file or trouble.
With --generation of a native table it prints the table in nft's words, for people only.
`
	aboutStatus = `Lists the last flushes, those seen by earlier runs too. With --flush it shows one in full: which
processes wrote meanwhile, with command lines, and the lost rules, as a diff of what iptables-save
or nft prints. With --watch it shows verdicts and flushes as they happen, until Ctrl-C: a screen on
a terminal, else a line for each change. With -o json that is a line of JSON with the last 10
flushes.
It waits for a daemon that is not there.
Exit code: 0 healthy, 1 not healthy, 2 no daemon or trouble; with --flush 0, 1 no such flush, 2;
with --watch 0 after Ctrl-C, 2 trouble.
`
	aboutHealth = `For probes, through the control socket, which connections of other users cannot fill up.
Prints ok or what is wrong, in one line. live is the default; it says nothing of losses.
Exit code: 0 ok, 1 not, 2 no daemon or trouble.
`
	aboutPause = `For planned work on the rules. The daemon detects and counts as before and is not ready; when
the time is over it replays what is still lost. A second pause takes the place of the first. A pause
survives a restart of the daemon. Status, page and log show who paused, since when, until when and,
with --why, the reason.
`
	aboutResume = `Exit code: 0 also if there was no pause, 2 no daemon or trouble.
`
	aboutCleanup = `Removes canaries and witnesses; with --rules the protected chains and the jumps into them too, with
--protect only those that it names (kube-proxy: kube without kubelet's). Where canaryd runs with
--protect=auto, --rules needs --protect: auto is all of it. A running daemon does it itself
and watches nothing any more until it is started again. It deletes its tables canaryd-keeper and
canaryd-standby too, which else vanish with its process, and on nft the tables that canaryd had
made, if they are empty. With --stay it then waits for SIGTERM, as the container of a DaemonSet's
pod has to.
`
)

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

// choose returns the command of a command line, and what follows it. Without a command it is "run".
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

// rareFlags are the flags of run that its help leaves out, so that it fits a screen.
var rareFlags = []string{"log-format", "replay", "canary-chain", "poll-interval", "drill-every", "lock-file", "lock-wait", "metrics-host", "metrics-required", "max-rules", "cni-results", "standby"}

const helpWidth = 100

// help prints a command's description. That of run, the default command, lists all others.
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
