package kube

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/internal/sorting"
)

// A report collects the faults of objects while they are read.
type report struct {
	objects *Objects
	skips   []Skip
	errs    []*ObjectError
}

// A reporter reports on one object.
type reporter struct {
	*report
	object                any
	kind, namespace, name string
}

func (r *report) service(s *Service) reporter {
	return reporter{r, s, "Service", s.Namespace, s.Name}
}

func (r *report) slice(s *EndpointSlice) reporter {
	return reporter{r, s, "EndpointSlice", s.Namespace, s.Name}
}

func (r *report) node(n *Node) reporter { return reporter{r, n, "Node", "", n.Name} }

// title names the object in a Skip or an error. It is only called for a message.
func (r reporter) title() string {
	if r.namespace == "" {
		return r.kind + " " + r.name
	}
	return r.kind + " " + r.namespace + "/" + r.name
}

// at returns " (also in FILE:LINE)" for an error about an object that is declared twice; ""
// if the object is from no file.
func (r *report) at(object any) string {
	if where := r.objects.origin[object]; where != "" {
		return " (also in " + where + ")"
	}
	return ""
}

// skip records that kube-proxy ignores the object, or a field of it, by design.
func (r reporter) skip(field, reason string) {
	r.skips = append(r.skips, Skip{r.objects.origin[r.object], r.title(), field, reason, false, false})
}

// broken records that the object, or a field of it, is wrong, and that kube-proxy leaves it
// out.
func (r reporter) broken(field, format string, args ...any) {
	r.skips = append(r.skips, Skip{r.objects.origin[r.object], r.title(), field, fmt.Sprintf(format, args...), true, false})
}

// refuse records that no rules can be made from the field.
func (r reporter) refuse(field, format string, args ...any) {
	r.errs = append(r.errs, &ObjectError{r.objects.origin[r.object], r.title(), field, fmt.Sprintf(format, args...)})
}

// skipped returns the skips, sorted and without duplicates: a read of both families may have
// recorded a skip twice.
func (r *report) skipped() []Skip {
	sorting.Stable(r.skips, func(a, b Skip) int {
		return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Where, b.Where),
			cmp.Compare(a.Field, b.Field), cmp.Compare(a.Reason, b.Reason))
	})
	return slices.Compact(r.skips)
}

// err joins the refused fields for Generate, sorted and without duplicates; nil if there are
// none. Then Generate returns rules.
func (r *report) err() error {
	slices.SortFunc(r.errs, func(a, b *ObjectError) int { return cmp.Compare(a.Error(), b.Error()) })
	var all []error
	for i, e := range r.errs {
		if i == 0 || *e != *r.errs[i-1] {
			all = append(all, e)
		}
	}
	return errors.Join(all...)
}
