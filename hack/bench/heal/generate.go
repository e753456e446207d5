package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/internal/source"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// turns is how many times a repetition measures generation. The median counts, because the
// first turn alone would measure how the heap grows.
const turns = 5

// measureGeneration measures the way from YAML to rules, without tables.
func measureGeneration(ctx context.Context, services int, dir string) (Uses, error) {
	text, err := data(services, "objects.yaml")
	if err != nil {
		return nil, err
	}
	uses := Uses{}
	var objects kube.Objects
	uses[decodeRun], err = measure.Work(func() (err error) {
		objects, err = kube.Decode("objects.yaml", text)
		return err
	})
	if err != nil {
		return nil, err
	}
	all := make([]measure.Use, turns)
	for i := range all {
		all[i], err = measure.Work(func() error {
			_, _, err := kube.Generate(objects, options(services))
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	uses[generateRun] = median(all)
	uses[declareRun], err = declareOne(ctx, text, options(services), dir)
	return uses, err
}

// median returns the median of each field.
func median(all []measure.Use) measure.Use {
	of := func(pick func(measure.Use) float64) float64 {
		var values []float64
		for _, u := range all {
			values = append(values, pick(u))
		}
		return measure.Summarize(values...).Median
	}
	return measure.Use{
		Seconds:       of(func(u measure.Use) float64 { return u.Seconds }),
		UserSeconds:   of(func(u measure.Use) float64 { return u.UserSeconds }),
		SystemSeconds: of(func(u measure.Use) float64 { return u.SystemSeconds }),
		MiB:           of(func(u measure.Use) float64 { return u.MiB }),
	}
}

// declareOne measures the time from replacing a manifest, with a changed endpoint, until its
// rules are declared. It includes the Watcher's wait for a quiet folder.
func declareOne(ctx context.Context, text []byte, o kube.Options, dir string) (use measure.Use, err error) {
	path := filepath.Join(dir, "objects.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return use, err
	}
	ctx = klog.NewContext(ctx, klog.Logger{}) // no log: the skips are the same in each repetition
	watcher := source.NewWatcher(nil, source.Manifest{Path: path, Options: o})
	first, err := watcher.Load(ctx)
	if err != nil {
		return use, err
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return watcher.Run(ctx) })
	defer func() {
		cancel()
		err = errors.Join(err, group.Wait())
	}()
	time.Sleep(quietFor) // the Watcher first checks for changes since Load
	changed, err := changeOne(text)
	if err != nil {
		return use, err
	}
	var next source.Declared
	use, err = measure.Work(func() error {
		if err := os.WriteFile(path+".new", changed, 0o600); err != nil {
			return err
		}
		if err := os.Rename(path+".new", path); err != nil {
			return err
		}
		select {
		case next = <-watcher.Changes():
			return nil
		case <-ctx.Done():
			return fmt.Errorf("nothing new is declared: %w", context.Cause(ctx))
		}
	})
	if err == nil && next.Generation[rules.IPv4.Table(rules.Nat)].Equal(first.Generation[rules.IPv4.Table(rules.Nat)]) {
		err = errors.New("the declared rules have not changed")
	}
	return use, err
}

var readyEndpoint = regexp.MustCompile(`addresses:\n  - (10\.[0-9.]+)\n  conditions: {}\n`)

// changeOne returns the objects with another address for an endpoint that has rules.
func changeOne(text []byte) ([]byte, error) {
	at := readyEndpoint.FindSubmatchIndex(text)
	if at == nil {
		return nil, errors.New("the objects hold no ready endpoint")
	}
	return bytes.Join([][]byte{text[:at[2]], text[at[3]:]}, []byte("10.200.201.202")), nil
}
