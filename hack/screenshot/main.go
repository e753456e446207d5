// Screenshot makes the pictures of canaryd's page in docs/images. It flushes a node's rules in
// many ways while canaryd runs, in a network namespace of its own. Chromium makes pictures of
// the page meanwhile. `make screenshot` runs it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/browser"
	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// marker is the environment variable that only the child has.
const marker = "CANARYD_SCREENSHOT"

func main() {
	os.Exit(run())
}

func run() int {
	var s shot
	flag.StringVar(&s.canaryd, "canaryd", "bin/canaryd", "the canaryd `program` to watch")
	flag.StringVar(&s.pictures, "o", "docs/images", "the pictures' `folder`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := s.absolute()
	if err == nil {
		if _, inside := netns.Inside(marker); inside {
			err = s.watch(ctx)
		} else {
			err = s.take(ctx)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "screenshot:", err)
		return 1
	}
	return 0
}

// A shot has the watched program, and the folder of its pictures.
type shot struct{ canaryd, pictures string }

func (s *shot) absolute() error {
	for _, path := range []*string{&s.canaryd, &s.pictures} {
		var err error
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	return nil
}

// take makes the pictures in a child with a namespace.
func (s *shot) take(ctx context.Context) error {
	cmd, err := netns.Command(ctx, marker, "yes", "-canaryd", s.canaryd, "-o", s.pictures)
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return netns.Run(cmd)
}

// picture runs a script in a page and makes a picture of the window.
func (s *shot) picture(ctx context.Context, name, url string, look browser.Look, script string) (err error) {
	b, err := browser.Start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	tab, err := b.Open(url, look)
	if err != nil {
		return err
	}
	if script != "" {
		if err := tab.Eval(script, nil); err != nil {
			return err
		}
	}
	path := filepath.Join(s.pictures, name)
	return tab.Screenshot(path, false)
}

// watch plays the story while canaryd runs.
func (s *shot) watch(ctx context.Context) (err error) {
	if err := netns.Setup(); err != nil {
		return err
	}
	p := scenario.Programs{With: iptables.NFT}
	if err := scenario.Load(ctx, p, rules.Families()...); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, s.canaryd, "run", "--state-dir=/run/state")
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), "NODE_NAME=node-1")
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
	}()
	return s.story(ctx, p)
}

// A scene is a step of the story, and its time.
type scene struct {
	after time.Duration
	do    func() error
}

// story makes events on the node that happen to nodes.
func (s *shot) story(ctx context.Context, p scenario.Programs) error {
	everything := func() error {
		for _, f := range rules.Families() {
			for _, t := range protect.Always() {
				if err := p.Flush(ctx, f, t, ""); err != nil {
					return err
				}
			}
		}
		return nil
	}
	ask := func(words ...string) func() error {
		return func() error { return exec.CommandContext(ctx, s.canaryd, words...).Run() }
	}
	look := func(name string, how browser.Look, script string) func() error {
		return func() error { return s.picture(ctx, name, "http://127.0.0.1:9475/", how, script) }
	}
	nat := func() error { return p.Flush(ctx, rules.IPv4, rules.Nat, "") }
	scenes := []scene{
		{3 * time.Second, nat},
		{12 * time.Second, everything},
		{12 * time.Second, func() error { return p.FlushRuleset(ctx) }},
		{10 * time.Second, func() error { return p.RestoreNoflush(ctx, rules.IPv4, scenario.NewService) }},
		{8 * time.Second, func() error { return p.Flush(ctx, rules.IPv4, rules.Filter, "FORWARD") }},
		{10 * time.Second, func() error { return p.Restore(ctx, rules.IPv4, scenario.SavedFilter(rules.IPv4)) }},
		{12 * time.Second, ask("pause", "--for=1m")},
		{3 * time.Second, everything},
		{8 * time.Second, look("page-dark.png", browser.Look{Width: 1280, Height: 1060, Dark: true}, "")},
		{4 * time.Second, ask("resume")},
		{8 * time.Second, look("page-light.png", browser.Look{Width: 1280, Height: 1060},
			"[...document.querySelectorAll('details')].find((d) => d.innerText.includes('jumps_missing')).open = true")},
	}
	for i, next := range scenes {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(next.after):
		}
		if err := next.do(); err != nil {
			return fmt.Errorf("scene %d: %w", i, err)
		}
	}
	return nil
}
