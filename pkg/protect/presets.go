package protect

import "github.com/canaryd/canaryd/pkg/owners"

// PresetNames returns the names of all presets, in the form of --protect.
func PresetNames() []string { return owners.Presets() }

// name makes the selector protect all parts of a row of the table of owners. NewSelector
// calls it. byWord: the operator named the owner; otherwise name omits rules that may be
// another program's (Straight.Unsigned).
func (s *Selector) name(o owners.Owner, byWord bool) {
	for _, c := range o.Chains {
		for _, f := range c.Names {
			if name, single := f.Exact(); single {
				s.exact[name] = c.Piecewise
				continue
			}
			s.forms = append(s.forms, f)
			if c.Piecewise {
				s.shared = append(s.shared, f)
			}
		}
	}
	for _, r := range o.Straight {
		if byWord || !r.Unsigned {
			s.rules = append(s.rules, r)
		}
	}
	for _, t := range o.Tables {
		for _, id := range t.IDs() {
			s.native = append(s.native, nativeGlob{id.Family, id.Name})
		}
	}
}
