package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/cluster"
)

func (l *lab) clientLoad() load {
	one := load{Rate: l.Rate}
	for i := range l.Cluster.Services() {
		one.Services = append(one.Services, cluster.Service(i))
	}
	for i := range cluster.HostPorts {
		one.HostPorts = append(one.HostPorts, cluster.HostPort(i))
	}
	return one
}

// A rateClient is the process that opens connections at a rate.
type rateClient struct {
	lab      *lab
	cmd      *exec.Cmd
	stdin    io.Closer
	reading  sync.WaitGroup
	attempts []attempt
	skipped  int
	err      error
	stderr   bytes.Buffer
}

func (l *lab) startRate(ctx context.Context) (traffic, error) {
	text, err := json.Marshal(l.clientLoad())
	if err != nil {
		return nil, err
	}
	c := &rateClient{lab: l, cmd: exec.CommandContext(ctx, "/proc/self/exe")}
	c.cmd.Env = append(os.Environ(), clientMarker+"="+string(text))
	c.cmd.Stderr = &c.stderr
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := l.In(cluster.Client, c.cmd.Start); err != nil {
		return nil, fmt.Errorf("starting the client: %w", err)
	}
	c.reading.Go(func() {
		for scan := bufio.NewScanner(stdout); scan.Scan(); {
			if scan.Text() == "skipped" {
				c.skipped++
				continue
			}
			a, err := parseAttempt(scan.Text())
			c.err = errors.Join(c.err, err)
			c.attempts = append(c.attempts, a)
		}
	})
	return c, nil
}

func (c *rateClient) before(ctx context.Context) error { return sleep(ctx, c.lab.moment(time.Second)) }

func (c *rateClient) after(ctx context.Context) error {
	return errors.Join(sleep(ctx, time.Second+c.lab.moment(time.Second)), c.lab.healer.heals(ctx), c.lab.healer.startOver(ctx))
}

// end stops the client, and sorts the attempts by their starts.
func (c *rateClient) end() error {
	_ = c.stdin.Close() // the client then ends; if not, the end of ctx kills it
	c.reading.Wait()
	if err := c.cmd.Wait(); err != nil {
		c.attempts = nil
		return fmt.Errorf("the client: %w: %s", err, c.stderr.String())
	}
	slices.SortFunc(c.attempts, func(a, b attempt) int { return cmp.Compare(a.Start, b.Start) })
	return c.err
}

func (c *rateClient) result(used time.Duration) result {
	return c.lab.result(c.attempts, c.skipped, used)
}
