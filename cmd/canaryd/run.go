package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/cgroup"
	"github.com/canaryd/canaryd/internal/cniresults"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/internal/web"
	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// runDaemon runs the daemon until ctx ends: it makes sure that it is the only one, waits for
// evidence of the backend, and serves.
func runDaemon(ctx context.Context, o *options, _ streams) (int, error) {
	release, err := here.Exclude()
	if err != nil {
		return exitError, err
	}
	defer release()
	if o.backend == "auto" && o.lastBackend(ctx) == "" {
		tell := func(words string) {
			if err := notifyManager(words); err != nil {
				severity.Warnings(klog.FromContext(ctx)).Error(err, "Could not notify the service manager; starting anyway")
			}
		}
		tell("STATUS=Looking for rules that show which backend is in use")
		// Firewalls that systemd starts after canaryd need not wait, because there are no rules
		// to guard.
		awaitEvidence(ctx, o.gatherEvidence, func() {
			tell("READY=1\nSTATUS=There are no rules yet; waiting a moment for an owner that shows which backend is in use")
		})
		if ctx.Err() != nil {
			return exitOK, nil // SIGTERM, before anything began
		}
	}
	kernel, store, err := open(ctx, o)
	if err != nil {
		return exitError, err
	}
	return exitOK, cmp.Or(serve(ctx, o, kernel, store), kernel.Close())
}

// open opens the kernel and the store of the state folder, for the daemon and for commands
// without one. An error closes the kernel.
func open(ctx context.Context, o *options) (*iptables.Kernel, *reload.Store, error) {
	cfg := o.kernelConfig()
	cfg.Before = o.lastBackend(ctx)
	kernel, err := iptables.Open(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	identity, err := here.Identify(kernel.Info())
	if err == nil {
		var store *reload.Store
		if store, err = reload.OpenStore(o.stateDir, identity); err == nil {
			store.KeepAside(filepath.Dir(o.socket))
			store.KeepBytes(kernel)
			kernel.KnowEarlier(store.Earlier)
			return kernel, store, nil
		}
		err = fmt.Errorf("%w (choose another with --state-dir)", err)
	}
	_ = kernel.Close() // the first error is the one to report
	return nil, nil, err
}

// lastBackend returns the backend that canaryd guarded before in this boot and network namespace;
// "" if the state folder has none. After a flush of everything there is no other evidence.
func (o *options) lastBackend(ctx context.Context) iptables.Backend {
	identity, err := here.Identify(iptables.Info{})
	if err != nil {
		klog.FromContext(ctx).V(1).Info("The backend of the last run is not known", "reason", err)
		return ""
	}
	last := iptables.Backend(reload.LastBackend(o.stateDir, identity))
	if last != iptables.NFT && last != iptables.Legacy {
		return ""
	}
	return last
}

// serve runs the loop, its watchers and its faces (socket, HTTP), and waits for them to end.
// runDaemon calls it, and closes the kernel afterwards.
func serve(ctx context.Context, o *options, kernel *iptables.Kernel, store *reload.Store) error {
	log := klog.FromContext(ctx)
	saveMemory()
	keepWithinGroup(log)
	info, program := kernel.Info(), built()
	log.Info("Starting", "version", program.version, "mode", o.mode, "backend", info.Backend, "iptables", info.Version,
		"reason", info.Reason, "families", kernel.Families(), "protect", o.protect)
	if info.Missing != "" {
		severity.Notices(log).Info("iptables programs are missing; canaryd guards rules without them, but cannot write declared rules or rules that an older canaryd stored",
			"reason", info.Missing, "advice", "if you declare rules, install the package and restart canaryd")
	}
	disabled := map[rules.Family]string{}
	for f, why := range kernel.Disabled() {
		disabled[f] = why.Error()
		severity.Notices(log).Info("A family is not watched", "family", f, "reason", why)
	}

	hints, writers := watch.NewHints(), &watch.Writers{}
	registry := prometheus.NewRegistry()
	metrics := metrics.NewMetrics(registry, metrics.MetricsOptions{
		Families: kernel.Families(), Sources: o.sourceNames(), Hints: hints.Counts,
		Version: program.version, Commit: program.commit, GoVersion: runtime.Version(),
	})
	guarded, err := o.guardNative(kernel)
	if err != nil {
		return err
	}
	defer guarded.closeIt()
	files, err := o.declare(ctx, kernel, metrics.ObserveSourceError)
	if err != nil {
		return err
	}
	standby, closeStandby, err := o.openStandby(kernel, hints)
	if err != nil {
		return err
	}
	defer closeStandby()
	d := daemon.New(daemon.Config{
		Kernel: kernel, Hints: hints, Writers: writers, LockHolder: func() (watch.Writer, bool) { return watch.LockHolder(o.lockFile) }, Metrics: metrics,
		Mode: api.Mode(o.mode), Source: strings.Join(o.sourceNames(), "+"),
		Protection: o.learned(), Protect: protect.Join(o.protect), Declared: files.declaration(), Declarations: files.changes,
		BrokenSources: files.broken, SourceErrors: files.news, Canary: o.canaryChain,
		PollInterval: o.poll, Settle: o.settle, JumpGrace: o.jumpGrace, DrillEvery: o.drillEvery, MaxStoredAge: o.maxStoredAge, Uptime: here.Uptime, FreeMemory: freeMemory,
		Store: store, Journal: journal.New(o.stateDir), Flows: conntrack.Kernel{}, Keeper: o.keeperOf(kernel), Standby: standby, Attachments: o.attachments(), Disabled: disabled, NativeTables: o.unguardedTables, Native: guarded.cfg, LeftOut: kernel.LeftOut,
		Sets: iptables.NewSets(), CPU: here.CPUTime, ListenRequired: o.metricsRequired,
		Elsewhere: o.elsewhere, Node: nodeName(),
	})
	socket, err := control.Listen(ctx, o.socket)
	if err != nil {
		return fmt.Errorf("the control socket: %w (choose another with --socket)", err)
	}
	lines := &flushLines{to: openLines(os.Stdout), node: nodeName()}
	reporting, reported := context.WithCancel(context.WithoutCancel(ctx))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		lines.run(reporting, d.Report)
		return nil
	})
	group.Go(func() error { return control.Serve(ctx, socket, control.NewHandler(d)) })
	if o.metricsAddress != "" {
		face := web.Listening{
			Address: o.metricsAddress, Report: d.ReportListening,
			Names:   o.metricsHosts,
			Handler: web.NewHTTPHandler(web.About{Node: nodeName(), Version: program.version}, d.Status, d.Alive, registry),
		}
		group.Go(func() error { return face.Run(ctx) })
	}
	startWatcher(ctx, group, watch.Watchers{
		Hints: hints, Writers: writers, Lock: o.lockFile,
		Subscribe: func() (watch.CommitSource, error) { return kernel.Subscribe() },
	}, info.Backend, guarded)
	startNotifier(ctx, group, d)
	files.run(ctx, group)
	group.Go(func() error {
		defer reported() // the last flush has its line, too
		return d.Run(ctx)
	})
	return group.Wait()
}

// keeperOf returns the kernel's keeper, which keeps connections through a flush; nil if
// --keeper is off.
func (o *options) keeperOf(kernel *iptables.Kernel) daemon.Keeper {
	if o.keeper == "off" {
		return nil
	}
	return kernel.Keeper()
}

// attachments returns libcni's files, by which the daemon knows the pods; nil if canaryd must
// not read them.
func (o *options) attachments() pods.Attachments {
	if o.cniResults == "" {
		return nil
	}
	return cniresults.New(o.cniResults)
}

// elsewhere opens the backend that is not guarded, for reading only: the loop looks there for
// rules that moved. The function closes it.
func (o *options) elsewhere(ctx context.Context, backend iptables.Backend) (daemon.Reader, func(), error) {
	cfg := o.kernelConfig()
	cfg.Backend, cfg.Replay = backend, iptables.ReplayAuto
	kernel, err := iptables.Open(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	return kernel, func() {
		if err := kernel.Close(); err != nil {
			severity.Warnings(klog.FromContext(ctx)).Error(err, "The other backend could not be closed", "backend", backend)
		}
	}, nil
}

// nodeName returns the node's name for the page: the DaemonSet's variable, else the host's
// name.
func nodeName() string {
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name
	}
	name, err := os.Hostname()
	if err != nil {
		return "" // the page works without a name
	}
	return name
}

// saveMemory lets the heap grow by 35 % between collections, instead of doubling, unless GOGC
// is set. docs/measured.md (Heals) compares values.
func saveMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(35)
	}
}

// keepWithinGroup limits the heap to the memory that the control group allows, unless
// GOMEMLIMIT is set. Otherwise the kernel could end canaryd although a collection would have
// sufficed.
func keepWithinGroup(log klog.Logger) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	limit, err := cgroup.MemoryLimit(os.DirFS("/"))
	if err != nil {
		severity.Warnings(log).Info("A limit of memory could not be read", "reason", err)
	}
	if limit.Bytes == 0 {
		return
	}
	debug.SetMemoryLimit(limit.HeapLimit())
	log.Info("The control group limits memory", "bytes", limit.Bytes, "of", limit.File, "heap", limit.HeapLimit())
}

// freeMemory returns free memory to the kernel. It collects twice, because the content of a
// sync.Pool outlives the first collection. encoding/json keeps there the buffer for the
// generation: 2 MiB at 20,000 rules.
func freeMemory() {
	runtime.GC()
	debug.FreeOSMemory()
}

// startWatcher starts the watchers that the guarded tables need. On legacy, native tables that
// are guarded later need the kernel's commits, too (watchLate).
func startWatcher(ctx context.Context, group *errgroup.Group, all watch.Watchers, backend iptables.Backend, guarded nativeGuard) {
	signs := signsOf(backend)
	ctx = klog.NewContext(ctx, severity.Warnings(klog.FromContext(ctx))) // until a watch works again, canaryd polls
	group.Go(func() error { return all.Run(ctx, signs) })
	if !signs.Commits {
		group.Go(func() error { return guarded.watchLate(ctx, all) })
	}
}
