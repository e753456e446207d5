// Kubectl-canaryd queries the canaryd of each node of a cluster. kubectl finds it as a plugin
// and runs it as kubectl canaryd. It has no credentials, because kubectl itself runs each
// command in the pods.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/canaryd/canaryd/internal/terminal"
)

// Exit codes; about documents them, too.
const (
	exitOK    = 0
	exitNo    = 1 // each node has answered, and one is not as it should be
	exitError = 2 // an answer is missing; or wrong usage, or trouble
)

// The linker sets linkedVersion and linkedCommit if make builds the program.
var linkedVersion, linkedCommit string

type command struct {
	name    string
	summary string
	about   string
	flags   []string // besides those of all commands
	run     func(context.Context, *options, streams) (int, error)
}

// streams are the inputs and outputs of a command.
type streams struct {
	out, err io.Writer
	watched  bool      // err is a terminal
	in       io.Reader // answers questions; nil: it is no terminal
	login    *os.File  // standard input for kubectl's first call, which may ask for a password
	now      func() time.Time
}

// commands returns all commands, in the order of help.
func commands() []command {
	return []command{
		{"status", "a row for each node, the worst first", aboutStatus, nil, runStatus},
		{"flushes", "which programs flushed rules, and on which nodes", aboutFlushes, []string{"since"}, runFlushes},
		{"detect", "which backend the rules of each node are in", aboutDetect, nil, runDetect},
		{"pause", "pause replays on some nodes, for planned work", aboutPause, []string{"for", "why", "all", "yes"}, runPause},
		{"resume", "end a pause; lost rules are replayed at once", aboutResume, []string{"all", "yes"}, runResume},
		{"sysdump", "write an archive for a bug report, without rules", aboutSysdump, []string{"file", "log-lines", "unredacted"}, runSysdump},
		{"version", "print the version of this plugin", "", nil, runVersion},
	}
}

const (
	about = `kubectl canaryd queries the canaryd of all nodes, or of nodes by name or by labels (-l).
kubectl runs the commands in the pods. It gets all of its own flags (kubectl options), such as
--context, and -n, which is kube-system by default.

Usage: kubectl canaryd COMMAND [FLAGS] [NODE...]

`
	aboutExit = `
Exit code: 0 all is well, 1 all nodes answered and a node is not well, 2 an answer is missing, or
trouble. A node that does not answer is unknown, and never well. kubectl canaryd COMMAND --help
says more. Flags of all commands:

`
	aboutStatus = `A node without an answer is unknown: its pod does not run, kubectl fails, or the time is over.
Exit code: 0 all are healthy, 1 one is not, 2 one is unknown, or trouble.
`
	aboutFlushes = `Lists the programs that flushed, then each flush, the newest first. Flushes whose rules are still
missing are always listed. A node keeps its last 100 flushes; if some may be missing, the answer
says so. -o json: fields as in docs/architecture.md. Exit code: 0, 2 no answer of a node, or
trouble.
`
	aboutDetect = `Runs canaryd detect in each pod: it counts the rules of both backends. Nodes with rules in both come
first. Exit code: 0, 1 a node has rules in both, 2 an answer is missing, or trouble.
`
	aboutPause = `Needs agreement. Name nodes, select them, or say --all. A node without an answer may be paused
or not, and is unknown. Exit code: 0 all are paused, 2 one may not be, or trouble.
`
	aboutResume = `Needs agreement. Name nodes, select them, or say --all.
Exit code: 0 no pause is left, 2 one may be left, or trouble.
`
	aboutSysdump = `Writes a .tar.gz with status, flushes, version, pod and log of each node. It has no more than HTTP
shows (docs/security.md): no rule, comment, address or command line. Of a log line it keeps the
message and harmless values. Read it before you send it: it names nodes, chains and programs.
Exit code: 0, 2 an answer is missing, or trouble.
`
)

// main runs one command line until it ends, or until SIGINT or SIGTERM ends ctx.
func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	to := streams{
		out: terminal.OnScreen(os.Stdout, os.Getenv), err: os.Stderr, watched: terminal.Is(os.Stderr, os.Getenv),
		login: os.Stdin, now: time.Now,
	}
	if terminal.Is(os.Stdin, os.Getenv) {
		to.in = os.Stdin
	}
	code := run(ctx, os.Args[1:], to)
	stop()
	os.Exit(code)
}

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, to streams) int {
	all := commands()
	if len(args) == 0 || slices.Contains([]string{"help", "-h", "--help"}, args[0]) {
		helpAll(to.out)
		return exitOK
	}
	if args[0] == "--version" {
		args = []string{"version"}
	}
	i := slices.IndexFunc(all, func(c command) bool { return c.name == args[0] })
	if i < 0 {
		return fail(to, fmt.Errorf("there is no command %q (see kubectl canaryd --help)", args[0]))
	}
	o := &options{}
	flags := o.flagSet(all[i])
	flags.SetOutput(io.Discard)
	flags.Usage = func() {}
	switch err := flags.Parse(args[1:]); {
	case errors.Is(err, pflag.ErrHelp):
		fmt.Fprintf(to.out, "kubectl canaryd %s: %s\n%s\n", all[i].name, all[i].summary, all[i].about)
		fmt.Fprint(to.out, flags.FlagUsagesWrapped(helpWidth))
		return exitOK
	case err != nil:
		return fail(to, fmt.Errorf("%w (see kubectl canaryd %s --help)", err, all[i].name))
	}
	if err := o.complete(flags); err != nil {
		return fail(to, err)
	}
	code, err := all[i].run(ctx, o, to)
	if err != nil {
		return fail(to, err)
	}
	return code
}

const helpWidth = 100

// helpAll prints the help of the program: all commands, the exit codes and the common flags.
func helpAll(w io.Writer) {
	fmt.Fprint(w, about)
	for _, c := range commands() {
		fmt.Fprintf(w, "  %-8s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w, aboutExit)
	fmt.Fprint(w, new(options).flagSet(command{}).FlagUsagesWrapped(helpWidth))
}

func fail(to streams, err error) int {
	say(to, err.Error())
	return exitError
}

// say writes one line for people to the error stream.
func say(to streams, text string) {
	_, _ = fmt.Fprintln(to.err, "kubectl canaryd:", terminal.Plain(terminal.OneLine(text)))
}

// version returns the version of this program, and the commit of its build; "unknown" without a
// record.
func version() (number, commit string) {
	number, commit = linkedVersion, linkedCommit
	if info, ok := debug.ReadBuildInfo(); ok && number == "" {
		number = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				commit = s.Value[:min(len(s.Value), 12)]
			}
		}
	}
	return cmp.Or(number, "unknown"), cmp.Or(commit, "unknown")
}

// runVersion prints the version of this program, and queries no node.
func runVersion(_ context.Context, o *options, to streams) (int, error) {
	number, commit := version()
	answer := struct {
		Version string `json:"version"`
		Commit  string `json:"commit"`
	}{number, commit}
	return exitOK, show(to.out, o.output, answer, func(w io.Writer) {
		fmt.Fprintf(w, "kubectl-canaryd %s, commit %s\n", number, commit)
	})
}

// show prints value as JSON if output (-o) is "json", and else the text of write, for people.
func show(w io.Writer, output string, value any, write func(io.Writer)) error {
	if output == "json" {
		return terminal.JSON(w, value)
	}
	_, err := io.WriteString(w, terminal.TextFor(w, write))
	return err
}

// count returns "1 node" and "2 nodes".
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %s", n, thing+"s")
}
