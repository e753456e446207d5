package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/web"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// options has the values of all commands' flags.
type options struct {
	source, protect, metricsHosts    []string
	mode, replay, backend, ipFamily  string
	keeper, standby, logFormat       string
	canaryChain                      string
	poll, settle, jumpGrace          time.Duration
	drillEvery                       time.Duration
	lockFile                         string
	lockWait, maxStoredAge           time.Duration
	maxRules                         int
	stateDir, socket, metricsAddress string
	output, generation               string
	manifest, rulesDir, cniResults   string
	generator                        generator
	rules, check, metricsRequired    bool
	stay                             bool // cleanup
	protectGiven                     bool // --protect was given
	yes, dryRun                      bool // restore; yes of drill, too
	table, kind                      string
	forReal                          bool // drill
	watch                            bool // status
	confirm, forget                  bool // baseline
	pause                            time.Duration
	why                              string
	flush                            string // number or ID of a flush
	oneFlush                         bool   // --flush was given, perhaps empty
	word                             string // the word behind the command, one of command.words

	selector protect.Selector // made of protect
	families []rules.Family   // made of ipFamily
}

// lookFlags returns the flags that choose the tables to read, and the way to read them.
func lookFlags() []string {
	return []string{"protect", "backend", "ip-family", "canary-chain", "lock-file", "lock-wait", "state-dir", "socket", "output"}
}

func renderFlags() []string {
	return append([]string{"source", "manifest", "rules-dir", "check", "ip-family", "generation", "backend", "protect", "state-dir", "socket"}, generatorFlags()...)
}

// runFlags returns the names of the flags of canaryd run, in the order of help.
func runFlags() []string {
	return []string{
		"source", "manifest", "rules-dir", "protect", "mode", "replay", "keeper", "standby", "backend", "ip-family", "canary-chain", "poll-interval", "settle",
		"jump-grace", "drill-every", "lock-file", "lock-wait", "max-stored-age", "state-dir", "cni-results", "socket", "metrics-bind-address", "metrics-host", "metrics-required", "max-rules", "log-format",
	}
}

// allFlags returns the flags of all commands, which fill o. flagSet picks those of one command.
func (o *options) allFlags() *pflag.FlagSet {
	all := pflag.NewFlagSet("canaryd", pflag.ContinueOnError)
	all.StringSliceVar(&o.source, "source", []string{"snapshot"}, "snapshot (of the kernel), manifest")
	all.StringVar(&o.manifest, "manifest", "", "Kubernetes objects: YAML `file` or folder")
	all.StringVar(&o.rulesDir, "rules-dir", "", "`folder` of your own rules: *.v4, *.v6")
	all.StringSliceVar(&o.protect, "protect", []string{protect.Auto}, "auto (all owners found; auto,-docker leaves one out), presets (docs/presets.md), globs, nft:FAMILY:NAME, rule:TABLE:CHAIN:GLOB")
	all.StringVar(&o.mode, "mode", "heal", "heal, or observe: write nothing but canaries")
	all.StringVar(&o.replay, "replay", "auto", "auto, text (iptables), direct (nft only)")
	all.StringVar(&o.keeper, "keeper", "auto", "auto (keep connections through a flush), off")
	all.StringVar(&o.standby, "standby", "auto", "translate during replays: auto (long ones), on, off")
	all.StringVar(&o.backend, "backend", "auto", "auto (by evidence), nft or legacy")
	all.StringVar(&o.ipFamily, "ip-family", "auto", "auto (all there are), ipv4, ipv6, dual")
	all.StringVar(&o.canaryChain, "canary-chain", canary.DefaultChain, "name of our own chain")
	all.DurationVar(&o.poll, "poll-interval", time.Second, "look at least this often")
	all.DurationVar(&o.settle, "settle", 20*time.Millisecond, "quiet time before a replay, at most 30s")
	all.DurationVar(&o.jumpGrace, "jump-grace", 15*time.Second, "leave deleted jumps to their owner this long")
	all.DurationVar(&o.drillEvery, "drill-every", 0, "have a drill this often, such as 168h, at times of each node's own; 0: on request only")
	all.StringVar(&o.lockFile, "lock-file", "/run/xtables.lock", "the xtables lock")
	all.DurationVar(&o.lockWait, "lock-wait", 5*time.Second, "wait this long for the lock, then again later")
	all.DurationVar(&o.maxStoredAge, "max-stored-age", 10*time.Minute, "replay at start only a younger generation")
	all.StringVar(&o.stateDir, "state-dir", "/var/lib/canaryd", "folder of the stored generations")
	all.StringVar(&o.cniResults, "cni-results", "/var/lib/cni/results", "`folder` in which libcni keeps a file per pod; empty: not read")
	all.StringVar(&o.socket, "socket", "/run/canaryd/canaryd.sock", "the control socket")
	all.StringVar(&o.metricsAddress, "metrics-bind-address", "127.0.0.1:9475", "HTTP address; empty: none")
	all.StringSliceVar(&o.metricsHosts, "metrics-host", nil, "further `names` that HTTP answers under; its address and localhost always are")
	all.BoolVar(&o.metricsRequired, "metrics-required", false, "not healthy while that address is taken")
	all.IntVar(&o.maxRules, "max-rules", iptables.DefaultMaxRules, "keep so many rules of a family, and native tables as large as that; 0: no limit")
	all.StringVar(&o.logFormat, "log-format", "text", "text, or json: a line of JSON for each line of the log")
	all.StringVarP(&o.output, "output", "o", "table", "table or json")
	all.StringVar(&o.flush, "flush", "", "show all of one flush: its `number` in the list, 1 is the newest, or its ID")
	all.BoolVar(&o.watch, "watch", false, "show each change, until Ctrl-C")
	all.StringVar(&o.generation, "generation", "", "`ID` of a stored generation, or its beginning; default the present generation")
	all.BoolVar(&o.check, "check", false, "try each rule of --manifest and --rules-dir in the kernel")
	all.BoolVar(&o.rules, "rules", false, "remove the protected chains and their jumps as well")
	all.BoolVar(&o.stay, "stay", false, "then wait for SIGTERM: for a DaemonSet's pod")

	all.BoolVar(&o.dryRun, "dry-run", false, "print the additions and removals, and write nothing")
	all.BoolVar(&o.yes, "yes", false, "remove protected rules that the generation does not have")

	all.BoolVar(&o.confirm, "confirm", false, "take the rules that ought to be in force now for the baseline")
	all.BoolVar(&o.forget, "forget", false, "remove the baseline")

	all.StringVar(&o.table, "table", "", "table whose canary is taken: "+strings.Join(api.Words(protect.Tables()), ", ")+"; or native; default nat and native, as far as there are guarded rules")
	all.StringVar(&o.kind, "kind", "", "how it is taken: "+strings.Join(api.Words(canary.DrillKinds()), ", ")+"; of native tables "+strings.Join(api.Words(native.DrillKinds()), ", ")+"; the first is the default")
	all.BoolVar(&o.forReal, "for-real", false, "take the protected jumps of nat PREROUTING instead")

	all.DurationVar(&o.pause, "for", 10*time.Minute, "how long, at most 24h")
	all.StringVar(&o.why, "why", "", fmt.Sprintf("reason as a `text` of at most %d characters; status, page and log show it", api.MostWhy))

	o.generator.addTo(all)
	return all
}

// flagSet returns cmd's flags and klog's, for parsing, completions and the manual. Of klog's,
// help shows only the verbosity.
func (o *options) flagSet(cmd command) *pflag.FlagSet {
	all := o.allFlags()
	if cmd.name == "check" {
		all.Lookup("output").Usage = "table, json, or line: all in 80 bytes"
	}
	if cmd.name == "drill" {
		all.Lookup("yes").Usage = "drill for real without a question"
	}
	if cmd.name == "baseline" {
		all.Lookup("generation").Usage = "`ID`s of the generations that --confirm takes, present or stored, with commas between them"
	}
	flags := pflag.NewFlagSet(cmd.name, pflag.ContinueOnError)
	flags.SortFlags = false
	for _, name := range cmd.flags {
		flags.AddFlag(all.Lookup(name))
	}
	if cmd.name == "run" {
		for _, name := range generatorFlags() { // render shows them
			flags.AddFlag(all.Lookup(name))
			flags.Lookup(name).Hidden = true
		}
	}
	logging := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(logging)
	logging.VisitAll(func(f *flag.Flag) {
		flags.AddGoFlag(f)
		flags.Lookup(f.Name).Hidden = f.Name != "v"
	})
	flags.Lookup("v").Usage = "`number` for the log's verbosity"
	return flags
}

// klogOwns returns a flag of klog's that chooses the place or format of lines; "" if none is
// set. With such a flag klog itself writes the lines, as it did before canaryd had levels.
func klogOwns(flags *pflag.FlagSet) (name string) {
	logging := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(logging)
	flags.Visit(func(f *pflag.Flag) {
		if logging.Lookup(f.Name) != nil && f.Name != "v" && f.Name != "vmodule" && f.Value.String() != f.DefValue {
			name = f.Name
		}
	})
	return name
}

// logger returns the logger that the flags choose, and also gives it to klog. to is the
// program's log; klog writes the lines itself if one of its own flags is set.
func (o *options) logger(flags *pflag.FlagSet, to *lineWriter) klog.Logger {
	if klogOwns(flags) != "" {
		return klogLogger()
	}
	log := newLogger(to, o.logFormat == "json")
	klog.SetLoggerWithOptions(log, klog.ContextualLogger(true))
	return log
}

// flagValues returns the possible values of a command's flags, by flag. complete checks against
// them, and completions offer them. --protect also takes globs.
func flagValues(cmd command) map[string][]string {
	values := map[string][]string{
		"source":            {"snapshot", "manifest"},
		"protect":           append([]string{protect.Auto}, protect.PresetNames()...),
		"mode":              {"heal", "observe"},
		"replay":            {"auto", "text", "direct"},
		"keeper":            {"auto", "off"},
		"standby":           {"auto", "on", "off"},
		"log-format":        {"text", "json"},
		"backend":           {"auto", "nft", "legacy"},
		"ip-family":         {"auto", "ipv4", "ipv6", "dual"},
		"output":            {"table", "json"},
		"table":             append(api.Words(protect.Tables()), string(api.DrillNative)),
		"kind":              append(api.Words(canary.DrillKinds()), string(canary.TableDeleted)),
		"random-fully":      {"auto", "true", "false"},
		"detect-local-mode": {"ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"},
	}
	if cmd.name == "check" {
		values["output"] = append(values["output"], "line")
	}
	return values
}

// complete checks the values for cmd and derives the others, such as the selector. Its error
// names every wrong flag in one line. flags are the parsed ones.
func (o *options) complete(cmd command, flags *pflag.FlagSet) error {
	values := flagValues(cmd)
	var errs []error
	checkWords := func(names ...string) {
		for _, name := range names {
			if f := flags.Lookup(name); f != nil && f.Value.String() != f.DefValue {
				errs = append(errs, oneOf(name, f.Value.String(), values[name]...))
			}
		}
	}
	checkWords("log-format", "mode", "replay", "keeper", "standby", "backend", "ip-family", "output", "table", "kind")
	errs = append(errs,
		atLeast("poll-interval", o.poll, 10*time.Millisecond),
		atLeast("settle", o.settle, 0),
		atMost("settle", o.settle, daemon.MostSettle),
		atLeast("jump-grace", o.jumpGrace, 0),
		atLeast("drill-every", cmp.Or(o.drillEvery, time.Minute), time.Minute),
		atLeast("lock-wait", o.lockWait, time.Millisecond),
		atLeast("max-stored-age", o.maxStoredAge, 0),
		daemon.CheckPause("--for", o.pause),
		daemon.CheckWhy("--why", o.why),
	)
	if len(o.source) == 0 {
		errs = append(errs, errors.New("--source is empty: want snapshot or manifest"))
	}
	if len(o.protect) == 0 {
		errs = append(errs, errors.New("--protect is empty: want auto, presets ("+strings.Join(protect.PresetNames(), ", ")+") or globs of chain names"))
	}
	for _, s := range o.source {
		errs = append(errs, oneOf("source", s, values["source"]...))
	}
	checkWords("random-fully", "detect-local-mode")
	errs = append(errs, o.checkSources())
	var err error
	if o.selector, err = protect.NewSelector(o.protect); err != nil {
		errs = append(errs, fmt.Errorf("--protect: %w", err))
	}
	if err := rules.CheckChainName(o.canaryChain); err != nil {
		errs = append(errs, fmt.Errorf("--canary-chain: %w", err))
	} else if o.selector.Protects(o.canaryChain) {
		errs = append(errs, fmt.Errorf("--canary-chain: %s is a chain that --protect names", o.canaryChain))
	}
	if o.maxRules < 0 {
		errs = append(errs, fmt.Errorf("--max-rules is %d: want at least 0, which is no limit", o.maxRules))
	}
	errs = append(errs, o.checkHTTP()...)
	if f := klogOwns(flags); f != "" && o.logFormat == "json" {
		errs = append(errs, fmt.Errorf("--log-format=json and --%s exclude each other", f))
	}
	for _, name := range []string{"table", "kind"} {
		if o.forReal && flags.Changed(name) {
			errs = append(errs, fmt.Errorf("--for-real takes the protected jumps of nat PREROUTING: leave out --%s", name))
		}
	}
	switch o.ipFamily {
	case "ipv4":
		o.families = []rules.Family{rules.IPv4}
	case "ipv6":
		o.families = []rules.Family{rules.IPv6}
	default:
		o.families = rules.Families()
	}
	if err := errors.Join(errs...); err != nil {
		return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

// checkHTTP returns the errors of the flags for HTTP, for complete.
func (o *options) checkHTTP() (errs []error) {
	if o.metricsAddress != "" {
		if _, _, err := net.SplitHostPort(o.metricsAddress); err != nil {
			errs = append(errs, fmt.Errorf("--metrics-bind-address is %q: want HOST:PORT, or nothing to turn it off", o.metricsAddress))
		}
	}
	for _, name := range o.metricsHosts {
		if err := web.CheckHostName(name); err != nil {
			errs = append(errs, fmt.Errorf("--metrics-host: %w", err))
		}
	}
	return errs
}

func (o *options) uses(source string) bool { return slices.Contains(o.source, source) }

// checkSources returns the error of --source and --manifest if one needs the other; nil if they
// agree.
func (o *options) checkSources() error {
	switch {
	case o.uses("manifest") && o.manifest == "":
		return errors.New("--source=manifest needs --manifest, a YAML file or a folder of them")
	case !o.uses("manifest") && o.manifest != "":
		return errors.New("--manifest is of use with --source=manifest only")
	default:
		return nil
	}
}

// oneOf returns the error of a flag whose value is none of the allowed ones; nil if it is one.
func oneOf(name, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fmt.Errorf("--%s is %q: want %s", name, value, strings.Join(allowed, " or "))
}

// atLeast returns the error of a flag with a time that is too short; nil if it is long enough.
func atLeast(name string, value, least time.Duration) error {
	if value >= least {
		return nil
	}
	return fmt.Errorf("--%s is %s: want at least %s", name, value, least)
}

// atMost returns the error of a flag with a time that is too long; nil if it is short enough.
func atMost(name string, value, most time.Duration) error {
	if value <= most {
		return nil
	}
	return fmt.Errorf("--%s is %s: want at most %s", name, value, most)
}

// kernelConfig returns the configuration with which a command opens iptables. Above --max-rules
// the chains that --protect names are left out last.
func (o *options) kernelConfig() iptables.Config {
	c := iptables.Config{
		Families: o.families, Canary: o.canaryChain, LockFile: o.lockFile, LockWait: o.lockWait,
		Replay: iptables.Replay(o.replay), MaxRules: o.maxRules,
	}
	if o.maxRules == 0 {
		c.MaxRules = -1
	}
	if !o.uses("manifest") && o.rulesDir == "" { // otherwise any chain may be declared
		c.Protects = o.selector.Protects
	}
	if o.backend != "auto" {
		c.Backend = iptables.Backend(o.backend)
	}
	return c
}

func (o *options) client() control.Client { return control.Client{Socket: o.socket} }
