package main

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"github.com/canaryd/canaryd/internal/api"
)

// options has the values of all commands' flags.
type options struct {
	namespace, pods, container string
	nodes, program, output     string
	parallel                   int
	timeout, since, pause      time.Duration
	why, file                  string
	all, yes, unredacted       bool
	logLines                   int

	names  []string // of nodes
	global []string // flags for kubectl
}

// common are the flags of all commands.
var common = []string{"selector", "namespace", "pods", "container", "output", "timeout", "parallel", "kubectl"}

// Flags of kubectl that have a value, have several, or have none: see kubectl options. They are
// passed on unchanged. This program also uses the flags for a namespace.
var (
	ofKubectl = []string{
		"as", "as-uid", "cache-dir", "certificate-authority", "client-certificate", "client-key", "cluster", "context",
		"kubeconfig", "kuberc", "log-flush-frequency", "password", "profile", "profile-output", "request-timeout",
		"server", "tls-server-name", "token", "user", "username", "v", "vmodule",
	}
	listsOfKubectl    = []string{"as-group", "as-user-extra"}
	switchesOfKubectl = []string{"disable-compression", "insecure-skip-tls-verify", "match-server-version", "warnings-as-errors"}
	shorthands        = map[string]string{"server": "s", "v": "v"}
)

// flagSet returns cmd's flags, the common ones and kubectl's; kubectl's are hidden, and
// complete passes them on. The zero command has only the common ones.
func (o *options) flagSet(cmd command) *pflag.FlagSet {
	all := pflag.NewFlagSet("kubectl canaryd", pflag.ContinueOnError)
	all.StringVarP(&o.nodes, "selector", "l", "", "only nodes with these labels")
	all.StringVarP(&o.namespace, "namespace", "n", "kube-system", "namespace of canaryd's pods")
	all.StringVar(&o.pods, "pods", "app.kubernetes.io/part-of=canaryd", "`labels` of canaryd's pods; k8s-app=kube-proxy for a sidecar")
	all.StringVarP(&o.container, "container", "c", "canaryd", "container of canaryd in a pod")
	all.StringVarP(&o.output, "output", "o", "table", "table or json")
	all.DurationVar(&o.timeout, "timeout", 30*time.Second, "of each command on a node")
	all.IntVar(&o.parallel, "parallel", 16, "query so many nodes at once, 1 to 256; each takes a kubectl")
	all.StringVar(&o.program, "kubectl", "kubectl", "`program` to run as kubectl")

	all.DurationVar(&o.since, "since", 24*time.Hour, "list flushes that are not older")
	all.DurationVar(&o.pause, "for", 10*time.Minute, "how long, at most 24h")
	all.StringVar(&o.why, "why", "", "reason as a `text`, which status, page and log show")
	all.BoolVar(&o.all, "all", false, "all nodes")
	all.BoolVar(&o.yes, "yes", false, "do not ask")
	all.StringVarP(&o.file, "file", "f", "", "`file` to write; must not exist (canaryd-sysdump-TIME.tar.gz)")
	all.IntVar(&o.logLines, "log-lines", 2000, "last lines of the log of a node, up to 1 MiB")
	all.BoolVar(&o.unredacted, "unredacted", false, "keep rules, comments, addresses and command lines")

	flags := pflag.NewFlagSet(cmd.name, pflag.ContinueOnError)
	flags.SortFlags = false
	for _, name := range append(cmd.flags[:len(cmd.flags):len(cmd.flags)], common...) {
		flags.AddFlag(all.Lookup(name))
	}
	for _, name := range ofKubectl {
		flags.StringP(name, shorthands[name], "", "")
	}
	for _, name := range listsOfKubectl {
		flags.StringArray(name, nil, "")
	}
	for _, name := range switchesOfKubectl {
		flags.Bool(name, false, "")
	}
	flags.VisitAll(func(f *pflag.Flag) { f.Hidden = all.Lookup(f.Name) == nil })
	return flags
}

// complete checks the values of the parsed flags, and takes kubectl's flags and the names of
// nodes. Its error names every wrong flag in one line.
func (o *options) complete(flags *pflag.FlagSet) error {
	o.names = flags.Args()
	flags.Visit(func(f *pflag.Flag) {
		if !f.Hidden {
			return
		}
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, v := range values {
			o.global = append(o.global, "--"+f.Name+"="+v)
		}
	})
	var errs []error
	want := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	want(o.output == "table" || o.output == "json", "--output is %q: want table or json", o.output)
	want(o.timeout > 0, "--timeout is %s: want more than 0", o.timeout)
	want(o.since > 0, "--since is %s: want more than 0", o.since)
	want(o.parallel >= 1 && o.parallel <= 256, "--parallel is %d: want 1 to 256", o.parallel)
	want(o.logLines >= 0, "--log-lines is %d: want at least 0", o.logLines)
	want(isName(o.namespace), "--namespace is %q: that is no name", o.namespace)
	want(isName(o.container), "--container is %q: that is no name", o.container)
	want(o.pods != "", "--pods is empty: want labels")
	want(len(o.names) == 0 || o.nodes == "", "name nodes or select them with -l, not both")
	want(!o.all || len(o.names) == 0 && o.nodes == "", "--all and nodes that are named or selected exclude each other")
	want(o.pause >= api.LeastPause && o.pause <= api.MostPause, "--for is %s: want at least %s and at most %s", o.pause, api.LeastPause, api.MostPause)
	n := utf8.RuneCountInString(o.reason())
	want(n <= api.MostWhy, "--why has %d characters, with your name: want at most %d", n, api.MostWhy)
	if err := errors.Join(errs...); err != nil {
		return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

// The most bytes of an answer.
const (
	mostStatus = 8 << 20
	mostSmall  = 1 << 20
	mostPage   = 64 << 20 // of 500 pods or nodes
	mostLog    = 1 << 20
)

// reason returns the reason of a pause with the user's name, because canaryd in the pod cannot
// know it.
func (o *options) reason() string {
	who := "kubectl canaryd"
	if user := userName(); user != "" {
		who += ", " + user
	}
	if o.why == "" {
		return who
	}
	return o.why + " (" + who + ")"
}
