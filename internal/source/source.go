// Package source loads the rules that files declare: a manifest of Kubernetes
// objects and a folder of the operator's own fragments. It checks them, and it
// watches the files.
//
// Whatever is wrong with a file, nothing of it is applied: the last good rules
// stay. "Nothing" is never taken for "no rules": a missing or empty file or folder is
// broken. A file that somebody is writing is not read; see read for how that
// is told and what cannot be.
package source

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// A Source declares rules. Manifest and RulesDir are the ones there are.
type Source interface {
	// Name is what metrics and logs call it.
	Name() string
	look() sight
	read() ([]file, error)
	// declare makes rules of files; last is what it made of them before,
	// or the zero value. What they have in common is not made twice.
	declare(files []file, last Declared) (Declared, error)
	// path is where the files are, and recall returns what they declared when they
	// could be used last.
	path() string
	recall(g rules.Generation) Declared
}

// Declared is what one source, or several together, declare. It is a value.
type Declared struct {
	Generation rules.Generation
	// Skips tell of objects in files that have no part in the rules.
	Skips []kube.Skip

	owners  []owner
	decoded *kube.Decoder // what was read of a manifest
}

// An owner is one source's claim to chains.
type owner struct {
	source string // its name
	claims func(chain string) bool
	where  func(f rules.Family, t rules.TableName, chain string) string
	// line says where a rule stands, "" if that is not known; nil: of none.
	line func(f rules.Family, t rules.TableName, chain string, r rules.Rule) string
}

// Claims reports whether a declared source owns the chain of that name, be it
// wanted now or not.
func (d Declared) Claims(chain string) bool {
	for _, o := range d.owners {
		if o.claims(chain) {
			return true
		}
	}
	return false
}

// Known reports whether it is known of any source what it declares.
func (d Declared) Known() bool { return len(d.owners) > 0 }

// id differs between declarations that ask for different things.
func (d Declared) id() string { return fmt.Sprint(len(d.owners), d.Generation.ID()) }

// Origin returns the source that declares a rule, and where it stands there: file and
// line, or as much as is known. A jump's chain is built in. Without a chain, the
// source of one of the table's chains is returned.
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

// Combine returns what the parts declare together, as if each was loaded after
// the one before it. A chain that two of them claim is an error that names
// both.
func Combine(parts ...Declared) (Declared, error) {
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

// claimed returns an error for every chain of d that an owner in by claims.
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

func (d Declared) where(f rules.Family, t rules.TableName, chain string) string {
	for _, o := range d.owners {
		if o.claims(chain) {
			return o.where(f, t, chain)
		}
	}
	return ""
}

// A sourceError says on one line what is wrong with a source.
type sourceError struct {
	source string
	err    error
}

func (e *sourceError) Error() string { return e.source + ": " + oneLine(e.err) }
func (e *sourceError) Unwrap() error { return e.err }

// shownErrors is how many of several errors are told: somebody who mends five
// will look again.
const shownErrors = 5

// oneLine writes the errors that err joins behind each other.
func oneLine(err error) string {
	all := flatten(err)
	more := ""
	if n := len(all) - shownErrors; n > 0 {
		all, more = all[:shownErrors], fmt.Sprintf("; and %d more", n)
	}
	return strings.Join(all, "; ") + more
}

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
