package main

import (
	"context"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A lab acts, in this process, like the daemon without a loss: it reads the tables and judges
// them.
type lab struct {
	kernel   *iptables.Kernel
	replayer reload.Replayer
	examiner reload.Examiner
	job      reload.Job
	learned  reload.Learned
	uses     Uses
}

// measureLab measures reads and examinations of the rules in this namespace.
func measureLab(ctx context.Context, backend iptables.Backend, services int, dir string) (_ Uses, err error) {
	p, err := payload{}.write(dir, services)
	if err != nil {
		return nil, err
	}
	selector, err := protect.NewSelector([]string{"kube"})
	if err != nil {
		return nil, err
	}
	families := []rules.Family{rules.IPv4}
	kernel, err := iptables.Open(ctx, iptables.Config{Backend: backend, Families: families})
	if err != nil {
		return nil, err
	}
	defer func() {
		if closed := kernel.Close(); err == nil {
			err = closed
		}
	}()
	l := lab{
		kernel:   kernel,
		replayer: reload.Replayer{Kernel: kernel, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: selector.Protects}},
		examiner: reload.Examiner{Canary: canary.DefaultChain, Protection: rules.Protection{Chain: selector.Protects}},
		job:      reload.Job{Families: families, Marks: canary.Marks{}},
		uses:     Uses{},
	}
	owner := func(path string) func() error {
		return func() error {
			_, err := measure.Program(ctx, path, "iptables-"+string(backend)+"-restore", "-w", "5", "--noflush")
			return err
		}
	}
	steps := []func() error{
		func() error { return l.look(ctx, firstRead, "", canary.Intact) },
		func() error { return l.plant(ctx) },
		func() error { return l.look(ctx, "", "", canary.Intact) }, // reads the marks
		owner(p.one),
		func() error { return l.look(ctx, oneRead, oneExamine, canary.Changed) },
		owner(p.rewrite),
		func() error { return l.look(ctx, fullRead, fullExamine, canary.Changed) }, // the endpoint is back
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return l.uses, nil
}

// plant writes the marks, which distinguish a changed table from a flushed one.
func (l *lab) plant(ctx context.Context) error {
	result, err := l.replayer.Plant(ctx, l.job)
	if err != nil {
		return err
	}
	for t, tr := range result[rules.IPv4].Tables {
		l.job.Marks = l.job.Marks.With(rules.IPv4.Table(t), tr.Mark)
	}
	return result[rules.IPv4].Err
}

// look reads, judges and learns the tables. The verdict of nat must be want.
func (l *lab) look(ctx context.Context, read, examine string, want canary.Verdict) error {
	var snapshot iptables.Snapshot
	use, err := measure.Work(func() (err error) {
		snapshot, err = l.kernel.Read(ctx, rules.IPv4)
		return err
	})
	if err != nil {
		return err
	}
	l.keep(read, use)
	var found map[rules.TableName]reload.Examined
	use, err = measure.Work(func() error {
		found = l.examiner.Examine(snapshot, l.job)
		return nil
	})
	if err != nil {
		return err
	}
	l.keep(examine, use)
	for t, x := range found {
		if x.Finding.Err != nil {
			return fmt.Errorf("%s could not be examined: %w", t, x.Finding.Err)
		}
		l.learned, _ = l.learned.Learn(rules.IPv4, t, x.Section, x.Finding, time.Now())
	}
	l.job.Generation = l.learned.Generation
	if got := found[rules.Nat].Finding.Verdict; len(tableid.Of(l.job.Marks, rules.IPv4)) > 0 && got != want {
		return fmt.Errorf("nat is %s, not %s", got, want)
	}
	return nil
}

func (l *lab) keep(name string, use measure.Use) {
	if name != "" {
		l.uses[name] = use
	}
}
