// Picture draws docs/images/flush.svg: the view of a node's clients, and canaryd's log, while
// `nft flush ruleset` removes all rules. The recording is a real run in network namespaces of
// its own; `make picture` makes another one. Without -record it draws the last recording again.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/canaryd/canaryd/internal/testkit/netns"
)

// marker is the environment variable that only the recording child has.
const marker = "CANARYD_PICTURE"

func main() {
	os.Exit(run())
}

func run() int {
	canaryd := flag.String("canaryd", "bin/canaryd", "the canaryd `program` to record")
	again := flag.Bool("record", false, "record another run first")
	file := flag.String("recording", "hack/picture/recording.json", "the recording's `file`")
	out := flag.String("o", "docs/images/flush.svg", "the picture's `file`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if _, inside := netns.Inside(marker); inside {
		err = recordHere(ctx, *canaryd)
	} else {
		if *again {
			err = makeRecording(ctx, *canaryd, *file)
		}
		if err == nil {
			err = drawFile(*file, *out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "picture:", err)
		return 1
	}
	return 0
}

// makeRecording makes a recording in a child with namespaces of its own, and keeps it.
func makeRecording(ctx context.Context, canaryd, file string) error {
	program, err := filepath.Abs(canaryd)
	if err != nil {
		return err
	}
	cmd, err := netns.Command(ctx, marker, "yes", "-canaryd", program)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, os.Stderr
	if err := netns.Run(cmd); err != nil {
		return err
	}
	return os.WriteFile(file, text.Bytes(), 0o644)
}

func drawFile(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	var r recording
	if err := json.Unmarshal(text, &r); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	return os.WriteFile(to, r.draw(), 0o644)
}
