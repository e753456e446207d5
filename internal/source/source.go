// Package source loads the rules that files declare: a manifest of Kubernetes objects, and a folder
// of the operator's own fragments. It checks them, and it watches the files.
//
// [Load] loads a [Manifest] and a [RulesDir] once, into a value [Declared]. A daemon calls
// [NewWatcher] instead, then [Watcher.Start], and [Watcher.Run] on a goroutine: [Watcher.Changes]
// delivers each new declaration, and [Watcher.Problems] the broken files.
//
// If a file has any mistake, none of its rules are applied: the last good rules stay. A missing
// or empty file or folder is a mistake, too: it never means "no rules". A file that is being
// written is not read; function read explains how that is noticed.
package source

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// A Source declares rules: a Manifest or a RulesDir.
type Source interface {
	// Name is its name in metrics and logs.
	Name() string
	files() files
	// declare makes rules of files. last is its last result, or the zero value; declare reuses
	// the parts of last that have not changed.
	declare(files []file, last Declared) (Declared, error)
	// recall returns the last good declaration of the files, from its generation.
	recall(g rules.Generation) Declared
}

// Declared is the declaration of one or several sources. It is a value.
type Declared struct {
	Generation rules.Generation
	// Skips are the objects in files that play no part in the rules.
	Skips []kube.Skip

	owners  []owner
	decoded *kube.Decoder // the documents of a manifest
}

// An owner is one source's claim to chains.
type owner struct {
	source string // its name
	claims func(chain string) bool
	where  func(f rules.Family, t rules.TableName, chain string) string
	// line returns the file and line of a rule, "" if unknown. If line is nil, all are unknown.
	line func(f rules.Family, t rules.TableName, chain string, r rules.Rule) string
}

// Claims reports whether a declared source owns the chain of that name, even if no file declares
// the chain now.
func (d Declared) Claims(chain string) bool {
	return slices.ContainsFunc(d.owners, func(o owner) bool { return o.claims(chain) })
}

// Known reports whether the rules of any source are known.
func (d Declared) Known() bool { return len(d.owners) > 0 }

// id returns a text that differs between declarations with different rules.
func (d Declared) id() string { return fmt.Sprint(len(d.owners), d.Generation.ID()) }

// Origin returns the source that declares a rule, and the rule's file and line as far as they
// are known. A jump's chain is built in. Without a chain, it returns the source of one of the
// table's chains.
func (d Declared) Origin(f rules.Family, t rules.TableName, chain string, r rules.Rule) (source, where string) {
	into := chain
	switch {
	case rules.Builtin(t, chain):
		into = r.Target
	case chain == "":
		for _, c := range d.Generation[f.Table(t)].Chains {
			into = c.Name
		}
	}
	for _, o := range d.owners {
		if !o.claims(into) {
			continue
		}
		if o.line != nil {
			where = o.line(f, t, chain, r)
		}
		return o.source, cmp.Or(where, o.where(f, t, into))
	}
	return "", ""
}

// combine returns the common declaration of the parts, as if they were loaded one after the
// other. If two parts claim one chain, the error names both: only one source may write a chain.
func combine(parts ...Declared) (Declared, error) {
	all := Declared{Generation: rules.Generation{}}
	for _, p := range parts {
		if err := errors.Join(claimed(all, p), claimed(p, all)); err != nil {
			return Declared{}, err
		}
		all.owners = append(all.owners, p.owners...)
		all.Skips = append(all.Skips, p.Skips...)
		all.Generation = all.Generation.Clone()
		for id, s := range p.Generation {
			all.Generation = all.Generation.With(id, all.Generation[id].Then(s))
		}
	}
	return all, nil
}

// claimed returns an error for each chain of d that an owner in by claims, for combine; nil if
// there is none.
func claimed(d, by Declared) error {
	var conflicts []error
	for _, f := range rules.Families() {
		for _, t := range rules.AllTables() {
			for _, c := range d.Generation[f.Table(t)].Chains {
				for _, o := range by.owners {
					if o.claims(c.Name) {
						conflicts = append(conflicts, fmt.Errorf("%s: chain %s belongs to %s too: give one of them another name",
							d.where(f, t, c.Name), c.Name, o.where(f, t, c.Name)))
					}
				}
			}
		}
	}
	return errors.Join(conflicts...)
}

// where returns the place in the files at which a chain is declared; "" if it is not known.
// Error messages name it.
func (d Declared) where(f rules.Family, t rules.TableName, chain string) string {
	for _, o := range d.owners {
		if o.claims(chain) {
			return o.where(f, t, chain)
		}
	}
	return ""
}

// A sourceError describes a source's mistakes in one line.
type sourceError struct {
	source string
	err    error
}

func (e *sourceError) Error() string { return e.source + ": " + oneLine(e.err) }
func (e *sourceError) Unwrap() error { return e.err }

// shownErrors is how many errors of a source are shown: an operator who fixes five will look
// again.
const shownErrors = 5

// oneLine returns the errors that err joins, in one line, at most shownErrors. Reasons in
// status and log are such lines.
func oneLine(err error) string {
	all := flatten(err)
	more := ""
	if n := len(all) - shownErrors; n > 0 {
		all, more = all[:shownErrors], fmt.Sprintf("; and %d more", n)
	}
	return strings.Join(all, "; ") + more
}

// flatten returns the errors that err joins, also within each other, each in one line.
func flatten(err error) []string {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []string{strings.Join(strings.Fields(err.Error()), " ")}
	}
	var all []string
	for _, e := range joined.Unwrap() {
		all = append(all, flatten(e)...)
	}
	return all
}
