package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/cluster"
)

const (
	// beforeFlush is how long connections begin before a flush, and behindFlush how long
	// patient ones begin after it.
	beforeFlush = 500 * time.Millisecond
	behindFlush = 1500 * time.Millisecond
)

func viewFlags(p *plan) {
	flag.BoolVar(&p.View, "view", false, "measure what clients see, with established, patient and impatient connections of every kind")
	flag.IntVar(&p.FlushesPerKind, "flushes-per-kind", 1, "with -view, how often each kind of flush comes; -for has no effect then")
	flag.BoolVar(&p.ForwardDrop, "forward-drop", false, "with -view, FORWARD's policy is DROP, and only connections that kube-proxy marks are opened")
	flag.BoolVar(&p.Strict, "strict", true, "with -view, fail if canaryd's clients lose a connection")
	flag.IntVar(&p.Each, "each", 2, "with -view, established connections of each of ten kinds")
	flag.DurationVar(&p.Ping, "ping", 5*time.Millisecond, "with -view, between two questions of an established connection")
	flag.DurationVar(&p.Patient, "patient", 5*time.Millisecond, "with -view, between two connections that wait for 15s")
	flag.DurationVar(&p.Impatient, "impatient", 2*time.Millisecond, "with -view, between two connections that wait for 20ms")
}

// longest bounds the time of the flushes, and of the work before and after them.
func (p plan) longest() time.Duration {
	if !p.View {
		return p.For + 3*time.Minute
	}
	kinds := len(allKinds(p.Backend))
	return 3*time.Minute + time.Duration(kinds*p.FlushesPerKind*p.settings())*(deadAfter+recoversIn)
}

// A view is the clients of one node, one process in each place.
type view struct {
	lab     *lab
	began   int64
	clients []*viewClient
	cells   []*cell
	// strangers has the first wrong answers.
	strangers []string
}

// A viewClient is one process.
type viewClient struct {
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	replies *json.Decoder
	stderr  bytes.Buffer
}

// startView starts the clients, which open no connection yet.
func (l *lab) startView(ctx context.Context) (traffic, error) {
	v := &view{lab: l, began: clock()}
	all := l.ways()
	streams := 0
	for _, w := range all {
		if w.Network == "tcp4" {
			streams++
		}
	}
	for _, place := range []string{cluster.Client, cluster.Callers, cluster.Pods} {
		here := slices.DeleteFunc(slices.Clone(all), func(w way) bool { return w.Place != place })
		if len(here) == 0 {
			continue
		}
		text, err := json.Marshal(viewLoad{Ways: here, Each: l.Each, Ping: l.Ping,
			Patient: l.Patient * time.Duration(len(all)), Impatient: l.Impatient * time.Duration(streams)})
		if err != nil {
			return nil, err
		}
		c := &viewClient{cmd: exec.CommandContext(ctx, "/proc/self/exe")}
		c.cmd.Env = append(os.Environ(), viewMarker+"="+string(text))
		c.cmd.Stderr = &c.stderr
		stdout, err := c.cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if c.stdin, err = c.cmd.StdinPipe(); err != nil {
			return nil, err
		}
		if err := l.In(place, c.cmd.Start); err != nil {
			return nil, fmt.Errorf("starting a client of the view: %w", err)
		}
		c.replies = json.NewDecoder(stdout)
		v.clients = append(v.clients, c)
	}
	return v, nil
}

// order sends an order to all clients, and then returns their answers.
func (v *view) order(what string) ([]viewReply, error) {
	for _, c := range v.clients {
		if _, err := io.WriteString(c.stdin, what+"\n"); err != nil {
			return nil, fmt.Errorf("sending a client %q: %w: %s", what, err, c.stderr.String())
		}
	}
	if what == enough || what == cut {
		return nil, nil
	}
	var replies []viewReply
	for _, c := range v.clients {
		var r viewReply
		if err := c.replies.Decode(&r); err != nil {
			return nil, fmt.Errorf("reading a client's answer to %q: %w: %s", what, err, c.stderr.String())
		}
		if r.Error != "" {
			return nil, fmt.Errorf("a client's answer to %q: %s", what, r.Error)
		}
		replies = append(replies, r)
	}
	return replies, nil
}

func (v *view) before(ctx context.Context) error {
	if v.lab.Healer != byCanaryd {
		if err := forgetUnanswered(); err != nil {
			return err
		}
	}
	if _, err := v.order(near); err != nil {
		return err
	}
	return sleep(ctx, beforeFlush+v.lab.moment(beforeFlush/10))
}

func (v *view) after(ctx context.Context) error {
	err := sleep(ctx, behindFlush)
	if err == nil {
		_, err = v.order(enough)
	}
	if err == nil {
		err = errors.Join(v.lab.healer.settled(ctx), v.lab.healer.heals(ctx))
	}
	if err == nil && v.lab.Healer != byCanaryd {
		_, err = v.order(cut)
	}
	if err == nil {
		err = v.lab.healer.startOver(ctx)
	}
	if err != nil {
		return err
	}
	w := &v.lab.windows[len(v.lab.windows)-1]
	if w.To == 0 {
		w.To = clock()
	}
	replies, err := v.order(away)
	for _, r := range replies {
		for _, seen := range r.Views {
			v.add(*w, seen)
		}
	}
	return err
}

// add adds one way's results for one flush.
func (v *view) add(w window, seen wayView) {
	i := slices.IndexFunc(v.cells, func(c *cell) bool { return c.Flush == w.Kind && c.Way == seen.Way && c.Standby == w.Standby })
	if i < 0 {
		i, v.cells = len(v.cells), append(v.cells, &cell{Flush: w.Kind, Way: seen.Way, Standby: w.Standby})
	}
	for _, stranger := range v.cells[i].add(w, seen, v.lab.truth) {
		if len(v.strangers) < maxStrangers {
			v.strangers = append(v.strangers, fmt.Sprintf("%s, %s: %s", w.Kind, seen.Way, stranger))
		}
	}
}

func (v *view) end() error {
	var errs []error
	for _, c := range v.clients {
		_ = c.stdin.Close() // the client then ends, or else the end of ctx kills it
		if err := c.cmd.Wait(); err != nil {
			errs = append(errs, fmt.Errorf("a client of the view: %w: %s", err, c.stderr.String()))
		}
	}
	return errors.Join(errs...)
}

func (v *view) result(used time.Duration) result {
	r := result{
		Mode: v.lab.Mode, Costs: v.lab.costs, Healer: v.lab.Healer, Backend: string(v.lab.Backend), ServiceCount: v.lab.Services(), Strict: v.lab.Strict,
		Flushes: len(v.lab.windows), Changes: len(v.lab.truth.Changes) / 2, Problems: v.lab.problems, Strangers: v.strangers,
	}
	r.Processor = used.Seconds() / (time.Duration(clock()-v.began) * time.Microsecond).Seconds()
	slices.SortStableFunc(v.cells, func(a, b *cell) int {
		return cmp.Or(strings.Compare(a.Flush, b.Flush), strings.Compare(a.Way, b.Way))
	})
	for _, c := range v.cells {
		r.View = append(r.View, *c)
		r.Wrong += c.Wrong
		r.Calm += c.Calm
	}
	return r
}
