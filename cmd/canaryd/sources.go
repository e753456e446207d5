package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/source"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// declaredSources returns the sources that declare rules; the snapshot is none. randomFully
// means that iptables has --random-fully, which kube-proxy's rules then use.
func (o *options) declaredSources(families []rules.Family, randomFully bool) ([]source.Source, error) {
	var sources []source.Source
	if o.uses("manifest") {
		k, err := o.generator.options(families, randomFully)
		if err != nil {
			return nil, err
		}
		sources = append(sources, source.Manifest{Path: o.manifest, Options: k})
	}
	if o.rulesDir != "" {
		sources = append(sources, source.RulesDir{Dir: o.rulesDir, Families: families, Canary: o.canaryChain})
	}
	return sources, nil
}

// sourceNames returns the sources in use by their names in metrics and status.
func (o *options) sourceNames() []string {
	names := slices.Clone(o.source)
	if o.rulesDir != "" {
		names = append(names, "rules-dir")
	}
	return names
}

// learned returns the rules that the snapshot source learns from the kernel, for the daemon;
// without that source none.
func (o *options) learned() rules.Protection {
	p := o.selector.Protection()
	if !o.uses("snapshot") {
		p.Chain, p.Rule = func(string) bool { return false }, nil
	}
	return p
}

// declared has a running daemon's declarations from files. The zero value is for a daemon
// without declared sources.
type declared struct {
	watcher *source.Watcher
	first   source.Declared
	changes chan daemon.Declaration
	broken  []api.SourceError // at the start
	news    chan []api.SourceError
}

// declare loads the declared sources, if there are any. It refuses if kube-proxy owns the
// chains that they claim. Broken files do not end canaryd. It guards the rest and, if the state
// folder has them, the broken files' rules of an earlier run. failed is called with a source
// whenever its files are found broken.
func (o *options) declare(ctx context.Context, kernel *iptables.Kernel, failed func(string)) (declared, error) {
	sources, err := o.declaredSources(kernel.Families(), kernel.Info().RandomFully)
	if err != nil || len(sources) == 0 {
		return declared{}, err
	}
	d := declared{watcher: source.NewWatcher(failed, sources...), changes: make(chan daemon.Declaration), news: make(chan []api.SourceError)}
	d.watcher.Cache = source.Cache{Dir: o.stateDir}
	d.first = d.watcher.Start(ctx)
	select {
	case problems := <-d.watcher.Problems():
		d.broken = errorsOf(problems)
	default:
	}
	for _, f := range kernel.Families() {
		snapshot, err := kernel.Read(ctx, f)
		if err != nil {
			return declared{}, err
		}
		if owner := reload.OtherOwner(snapshot, d.first.Claims); owner != "" {
			return declared{}, fmt.Errorf("%s; stop it and delete that chain, or use --source=snapshot", owner)
		}
	}
	return d, nil
}

// declaration returns the files' declaration at the start, or nil if no file declares rules or
// none could be used. Later ones arrive by run.
func (d declared) declaration() *daemon.Declaration {
	if d.watcher == nil || !d.first.Known() {
		return nil
	}
	next := declarationOf(d.first)
	return &next
}

// errorsOf returns the sources' problems in the form of a Status.
func errorsOf(problems []source.Problem) []api.SourceError {
	var list []api.SourceError
	for _, p := range problems {
		list = append(list, api.SourceError{Source: p.Source, Where: p.Where, Reason: p.Reason, Since: p.Since, InForce: api.Instead(p.Instead)})
	}
	return list
}

// declarationOf returns a source's declaration in the daemon's form.
func declarationOf(d source.Declared) daemon.Declaration {
	return daemon.Declaration{
		Generation: d.Generation, Claims: d.Claims,
		Origin: func(f rules.Family, t rules.TableName, chain string, r rules.Rule) daemon.Origin {
			from, where := d.Origin(f, t, chain, r)
			return daemon.Origin{Source: from, Where: where}
		},
	}
}

// run watches the files and passes their declarations and problems to the daemon, in goroutines
// of group, until ctx ends.
func (d declared) run(ctx context.Context, group *errgroup.Group) {
	if d.watcher == nil {
		return
	}
	group.Go(func() error { return d.watcher.Run(ctx) })
	group.Go(func() error { return forward(ctx, d.watcher.Changes(), d.changes, declarationOf) })
	group.Go(func() error { return forward(ctx, d.watcher.Problems(), d.news, errorsOf) })
}

// forward converts the values from one channel, and sends them to another, until ctx ends.
func forward[A, B any](ctx context.Context, from <-chan A, to chan<- B, convert func(A) B) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case a := <-from:
			select {
			case to <- convert(a):
			case <-ctx.Done():
			}
		}
	}
}

// withoutLog returns a context without a log, for commands that print the same facts.
func withoutLog(ctx context.Context) context.Context { return klog.NewContext(ctx, klog.Logger{}) }

// printSkips prints the objects that declare no rules on the error stream. It returns how many
// of them are of unknown kinds: these are errors.
func printSkips(to streams, all source.Declared) (errs int) {
	for _, skip := range all.Skips {
		word := "skipped:"
		if skip.Unknown {
			word = "error, the rest counts:"
			errs++
		}
		_, _ = fmt.Fprintln(to.err, "canaryd:", word, plain(fmt.Sprint(skip)))
	}
	return errs
}

// renderDeclared prints the rules that files declare, without a daemon and without the kernel.
func renderDeclared(ctx context.Context, o *options, to streams, family rules.Family) (int, error) {
	if o.generation != "" {
		return exitError, errors.New("--generation names a stored generation; --source=manifest prints the rules of files")
	}
	// Every iptables that canaryd supports has --random-fully (1.6.2).
	sources, err := o.declaredSources([]rules.Family{family}, true)
	if err != nil {
		return exitError, err
	}
	all, err := source.Load(withoutLog(ctx), sources...)
	if err != nil {
		return exitError, err
	}
	printSkips(to, all)
	_, err = fmt.Fprint(to.out, rules.Render(all.Generation, family))
	return exitOK, err
}
