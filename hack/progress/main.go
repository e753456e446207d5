// Progress runs go test, prints its progress at least every ten seconds, and ends with a count.
//
//	progress [-events FILE] ARGUMENTS-OF-GO-TEST... [-- ARGUMENTS-OF-GO-TEST...]
//
// Each group of arguments is one run of go test, and the runs follow one another. Progress
// counts over all of them. With CI=true in the environment a skipped test is a failure, because
// it would hide that something was never tried.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	events := io.Discard
	if len(args) > 1 && args[0] == "-events" {
		file, err := os.Create(args[1])
		if err != nil {
			fmt.Fprintln(os.Stderr, "progress:", err)
			return 2
		}
		defer file.Close()
		buffered := bufio.NewWriter(file)
		defer buffered.Flush()
		events, args = buffered, args[2:]
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	runs := groups(args)
	all := plan{}
	for _, r := range runs {
		all.add(planned(r))
	}
	report := newReport(os.Stdout, width(), all)
	ticks, end := context.WithCancel(context.Background())
	ticked := make(chan struct{})
	go func() { report.tick(ticks); close(ticked) }()
	status := 0
	for _, r := range runs {
		if ctx.Err() == nil {
			status = max(status, goTest(ctx, r, report, events))
		}
	}
	end()
	<-ticked
	if ctx.Err() != nil {
		status = max(status, 1)
		report.print("interrupted")
	}
	return max(status, report.end(os.Getenv("CI") == "true"))
}

// groups splits the arguments at each --.
func groups(args []string) [][]string {
	var all [][]string
	for {
		i := slices.Index(args, "--")
		if i < 0 {
			return append(all, args)
		}
		all, args = append(all, args[:i]), args[i+1:]
	}
}

// goTest runs go test, and returns its exit code.
func goTest(ctx context.Context, args []string, report *report, events io.Writer) int {
	cmd := exec.CommandContext(ctx, "go", testArgs(args)...)
	if slices.Contains(args, "-race") { // the detector is written in C
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	stderr, writes := io.Pipe()
	cmd.Stderr = writes
	printed := make(chan struct{})
	go func() { defer close(printed); lines(stderr, report.print) }()
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		report.print("progress: go test: " + err.Error())
		return 2
	}
	readErr := report.read(io.TeeReader(stdout, events))
	err = cmd.Wait()
	writes.Close()
	<-printed
	report.used(cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime())
	if err != nil {
		return max(1, cmd.ProcessState.ExitCode())
	}
	if readErr != nil {
		report.print("progress: " + readErr.Error())
		return 2
	}
	return 0
}

// lines calls then with each line.
func lines(from io.Reader, then func(line string)) {
	for scan := bufio.NewScanner(from); scan.Scan(); {
		then(scan.Text())
	}
	_, _ = io.Copy(io.Discard, from) // go test can continue after too long a line
}

// testArgs returns the arguments of go. The flag -C must be the first one.
func testArgs(args []string) []string {
	if len(args) > 1 && args[0] == "-C" {
		return slices.Concat([]string{"test", "-C", args[1], "-json"}, args[2:])
	}
	return slices.Concat([]string{"test", "-json"}, args)
}

// width returns the columns of the terminal, or 0 if a line cannot be rewritten.
func width() int {
	size, err := unix.IoctlGetWinsize(int(os.Stdout.Fd()), unix.TIOCGWINSZ)
	if err != nil || os.Getenv("CI") == "true" || os.Getenv("TERM") == "dumb" {
		return 0
	}
	return int(size.Col)
}
