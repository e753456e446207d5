package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/internal/source"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
)

// checkDeclared checks whether the kernel takes the declared rules, and prints the file and
// line of each refused one. It does not query a running daemon, which has its own flags and so
// its own files.
func checkDeclared(ctx context.Context, o *options, to streams) (code int, err error) {
	kernel, err := iptables.Open(ctx, o.kernelConfig())
	if err != nil {
		return exitError, err
	}
	defer func() { err = cmp.Or(err, kernel.Close()) }()
	sources, err := o.declaredSources(kernel.Families(), kernel.Info().RandomFully)
	if err != nil {
		return exitError, err
	}
	all, err := source.Load(withoutLog(ctx), sources...)
	if err != nil {
		return exitError, err
	}
	errs := printSkips(to, all)
	refused, err := reload.Replayer{Kernel: kernel, Canary: o.canaryChain}.Try(ctx, all.Generation, kernel.Families()...)
	if errors.Is(err, iptables.ErrLocked) {
		return exitError, fmt.Errorf("%w; try again", err)
	}
	if err != nil {
		return exitError, err
	}
	for _, f := range kernel.Families() {
		for _, t := range protect.Tables() {
			for _, r := range refused[f.Table(t)] {
				_, where := all.Origin(f, t, r.Chain, r.Rule)
				_, _ = fmt.Fprintf(to.err, "canaryd: refused: %s: %s %s -A %s %s (%s)\n", // printing may fail; the exit code shows it too
					plain(where), f, t, plain(r.Chain), plain(r.Rule.Label()), plain(oneLine(r.Reason)))
			}
		}
	}
	if n := refused.Count(); n > 0 {
		_, err = fmt.Fprintf(to.out, "%d declared rules are refused; canaryd would leave their tables as they are\n", n)
		return exitNo, err
	}
	if errs > 0 {
		_, err = fmt.Fprintf(to.out, "all declared rules are taken, but %d objects declare none\n", errs)
		return exitNo, err
	}
	count, chains := all.Generation.Counts()
	_, err = fmt.Fprintf(to.out, "all declared rules are taken: %d in %d chains, backend %s\n", count, chains, kernel.Info().Backend)
	return exitOK, err
}
