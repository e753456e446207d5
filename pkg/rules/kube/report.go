package kube

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// A report gathers what is wrong with objects while they are read.
type report struct {
	objects *Objects
	skips   []Skip
	errs    []*ObjectError
}

// A reporter reports on one object.
type reporter struct {
	*report
	object any
	name   string
}

// on returns a reporter for the object. Its name is spelled only when there is
// something to tell.
func (r *report) on(object any, kind, namespace, name string) reporter {
	rep := reporter{report: r, object: object}
	switch {
	case namespace == "":
		rep.name = kind + " " + name
	default:
		rep.name = kind + " " + namespace + "/" + name
	}
	return rep
}

// at returns " (also in FILE:LINE)", or nothing for an object from no file.
func (r *report) at(object any) string {
	if where := r.objects.origin[object]; where != "" {
		return " (also in " + where + ")"
	}
	return ""
}

// skip tells that the object, or a field of it, is none of kube-proxy's
// business.
func (r reporter) skip(field, reason string) {
	r.skips = append(r.skips, Skip{r.objects.origin[r.object], r.name, field, reason, false})
}

// broken tells that the object, or a field of it, is left out as kube-proxy
// leaves it out.
func (r reporter) broken(field, format string, args ...any) {
	r.skips = append(r.skips, Skip{r.objects.origin[r.object], r.name, field, fmt.Sprintf(format, args...), true})
}

// refuse tells that no rules can be made of the field.
func (r reporter) refuse(field, format string, args ...any) {
	r.errs = append(r.errs, &ObjectError{r.objects.origin[r.object], r.name, field, fmt.Sprintf(format, args...)})
}

// skipped returns the skips in an order that does not depend on that of the
// objects. Both families may have told the same.
func (r *report) skipped() []Skip {
	slices.SortFunc(r.skips, func(a, b Skip) int {
		return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Where, b.Where),
			cmp.Compare(a.Field, b.Field), cmp.Compare(a.Reason, b.Reason))
	})
	return slices.Compact(r.skips)
}

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
