package tableid

import (
	"bytes"
	"encoding/json"
	"maps"
)

// Table returns the key of the family's table of that name.
func (f Family) Table(name string) TableID { return TableID{f, name} }

// With returns m with one value replaced; it does not change m, because other goroutines may
// read it.
func With[M ~map[TableID]V, V any](m M, id TableID, v V) M {
	next := maps.Clone(m)
	if next == nil {
		next = M{}
	}
	next[id] = v
	return next
}

// Of returns the values of the tables of family f, by table name; nil if it has none.
func Of[M ~map[TableID]V, V any](m M, f Family) map[string]V {
	return ByFamily(m)[f]
}

// ByFamily returns the values by family and then by table name, as JSON has them.
func ByFamily[M ~map[TableID]V, V any](m M) map[Family]map[string]V {
	nested := map[Family]map[string]V{}
	for id, v := range m {
		if nested[id.Family] == nil {
			nested[id.Family] = map[string]V{}
		}
		nested[id.Family][id.Name] = v
	}
	return nested
}

// Marshal writes m as a JSON object of families, each an object of tables. Files in the state
// folder and the control socket use this form.
func Marshal[M ~map[TableID]V, V any](m M) ([]byte, error) {
	if m == nil {
		return []byte("null"), nil
	}
	return json.Marshal(ByFamily(m))
}

// Unmarshal reads the output of Marshal. null gives a nil map. The error is of
// encoding/json, also for an unknown field.
func Unmarshal[M ~map[TableID]V, V any](data []byte, m *M) error {
	var nested map[Family]map[string]V
	strict := json.NewDecoder(bytes.NewReader(data))
	strict.DisallowUnknownFields() // the file may be from a later version, with unknown fields
	if err := strict.Decode(&nested); err != nil {
		return err
	}
	*m = nil
	if nested != nil {
		*m = M{}
	}
	for f, tables := range nested {
		Put(*m, f, tables)
	}
	return nil
}

// Put sets the values of one family's tables in m, which must not be nil unless tables is
// empty.
func Put[M ~map[TableID]V, V any](m M, f Family, tables map[string]V) {
	for name, v := range tables {
		m[f.Table(name)] = v
	}
}
