package kubernetes

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"

	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// A pair has a type of Kubernetes, and canaryd's type for the same JSON.
type pair struct {
	kind, apiVersion string
	real, ours       func() any
}

var pairs = []pair{
	{"Service", "v1", func() any { return &core.Service{} }, func() any { return &kube.Service{} }},
	{"EndpointSlice", "discovery.k8s.io/v1", func() any { return &discovery.EndpointSlice{} }, func() any { return &kube.EndpointSlice{} }},
	{"Node", "v1", func() any { return &core.Node{} }, func() any { return &kube.Node{} }},
}

// filled returns a real object with random values.
func (p pair) filled(seed int64, missing float64) any {
	fill := randfill.NewWithSeed(seed).NilChance(missing).NumElements(1, 3).Funcs(
		func(m *meta.TypeMeta, _ randfill.Continue) { m.Kind, m.APIVersion = p.kind, p.apiVersion },
		func(t *meta.Time, c randfill.Continue) { t.Time = time.Unix(c.Int63n(1<<33)+1, 0) },
		func(q *resource.Quantity, c randfill.Continue) {
			formats := []resource.Format{resource.DecimalExponent, resource.BinarySI, resource.DecimalSI}
			*q = *resource.NewMilliQuantity(c.Int63n(1<<50), formats[c.Intn(len(formats))])
			*q = resource.MustParse(q.String()) // the canonical form
		},
		func(i *intstr.IntOrString, c randfill.Continue) {
			if *i = intstr.FromInt32(c.Int31()); c.Bool() {
				*i = intstr.FromString(c.String(20))
			}
		},
		func(f *meta.FieldsV1, c randfill.Continue) {
			f.SetRawString(fmt.Sprintf(`{"f:metadata":{"f:a%d":{}}}`, c.Int31()))
		},
	)
	object := p.real()
	fill.Fill(object)
	return object
}

// strictly decodes with an error for unknown fields, as canaryd does.
func strictly(text []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	return decoder.Decode(into)
}

// decoded returns the object that canaryd reads.
func decoded(text []byte) (any, error) {
	objects, err := kube.Decode("f", text)
	switch {
	case err != nil:
		return nil, err
	case len(objects.Services) == 1:
		return objects.Services[0], nil
	case len(objects.Slices) == 1:
		return objects.Slices[0], nil
	case len(objects.Nodes) == 1:
		return objects.Nodes[0], nil
	}
	return nil, fmt.Errorf("%d objects were skipped, and no other was read", len(objects.Skipped))
}

// TestTypesHaveTheFields: each field of a Kubernetes object is a field of canaryd's type. A
// random object keeps all of its values when canaryd has read it.
func TestTypesHaveTheFields(t *testing.T) {
	for _, p := range pairs {
		t.Run(p.kind, func(t *testing.T) {
			for seed := range int64(200) {
				want := p.filled(seed, []float64{0, 0.5}[seed%2])
				text, err := json.Marshal(want)
				if err != nil {
					t.Fatal(err)
				}
				ours, err := decoded(text)
				if err != nil {
					t.Fatalf("seed %d: %v\n%s", seed, err, text)
				}
				again, err := json.Marshal(ours)
				if err != nil {
					t.Fatal(err)
				}
				got := p.real()
				if err := strictly(again, got); err != nil {
					t.Fatalf("seed %d: Kubernetes refuses what canaryd kept: %v\n%s", seed, err, again)
				}
				if !equality.Semantic.DeepEqual(want, got) {
					var before, after any
					_, _ = json.Unmarshal(text, &before), json.Unmarshal(again, &after)
					t.Fatalf("seed %d (-want +got):\n%s", seed, cmp.Diff(before, after))
				}
			}
		})
	}
}

// TestTypesAreAsStrict: canaryd's types refuse the same values as Kubernetes' types, and name
// the same field. In each case one value of a complete object is replaced, or an object has one
// more field. (A quantity "." is 0 to Kubernetes and none to canaryd.)
func TestTypesAreAsStrict(t *testing.T) {
	values := []string{
		`null`, `true`, `1`, `-1`, `1.5`, `1e30`, `2147483648`, `9223372036854775808`, `""`, `"x"`, `"1"`, `" 1Mi "`, `"1 Mi"`, `".5"`, `"1e3"`, `"1ki"`,
		`"2026-02-29T00:00:00Z"`, `"2026-11-27T15:00:00+01:00"`, `"2026-11-27"`, `[]`, `[1]`, `["x"]`, `{}`, `{"x":1}`, `{"x":"1"}`,
	}
	for _, p := range pairs {
		t.Run(p.kind, func(t *testing.T) {
			text, err := json.Marshal(p.filled(1, 0))
			if err != nil {
				t.Fatal(err)
			}
			var tree any
			if err := json.Unmarshal(text, &tree); err != nil {
				t.Fatal(err)
			}
			compare := func(change string) {
				text, err := json.Marshal(tree)
				if err != nil {
					t.Fatal(err)
				}
				want, got := strictly(text, p.real()), strictly(text, p.ours())
				if (want == nil) != (got == nil) {
					t.Errorf("%s: Kubernetes: %v, canaryd: %v", change, want, got)
					return
				}
				var real, ours *json.UnmarshalTypeError
				switch {
				case !errors.As(want, &real): // unknown fields, and errors without a field
				case !errors.As(got, &ours):
					t.Errorf("Kubernetes: %v, canaryd: %v", want, got)
				case real.Field != "" && (real.Field != ours.Field || real.Value != ours.Value):
					t.Errorf("Kubernetes says %s of %s, canaryd %s of %s", real.Value, real.Field, ours.Value, ours.Field)
				}
				if want != nil && strings.Contains(want.Error(), "unknown field") && want.Error() != got.Error() {
					t.Errorf("Kubernetes: %v, canaryd: %v", want, got)
				}
			}
			compare("no change")
			cases := 0
			each(tree, func(v any) { tree = v }, func(was any, set func(any)) {
				for _, value := range values {
					set(json.RawMessage(value))
					compare(fmt.Sprintf("%s for %v", value, was))
					cases++
				}
				set(was)
				if fields, ok := was.(map[string]any); ok {
					fields["noSuchField"] = 1
					compare("a field more")
					delete(fields, "noSuchField")
				}
			})
			if cases < 1000 {
				t.Errorf("only %d cases", cases)
			}
		})
	}
}

// each calls do with each value of a tree of JSON, and a function that sets it. In a list it
// takes the first value.
func each(value any, set func(any), do func(value any, set func(any))) {
	do(value, set)
	switch value := value.(type) {
	case map[string]any:
		for name, field := range value {
			each(field, func(v any) { value[name] = v }, do)
		}
	case []any:
		if len(value) > 0 {
			each(value[0], func(v any) { value[0] = v }, do)
		}
	}
}

// TestTypesHaveNoOtherFields: canaryd's types have only fields that Kubernetes has, and numbers
// of the same size.
func TestTypesHaveNoOtherFields(t *testing.T) {
	for _, p := range pairs {
		sameType(t, p.kind, reflect.TypeOf(p.real()), reflect.TypeOf(p.ours()))
	}
}

// texts are the types that canaryd keeps as text.
var texts = map[reflect.Type]reflect.Type{
	reflect.TypeFor[meta.Time](): reflect.TypeFor[kube.Time](), reflect.TypeFor[*meta.Time](): reflect.TypeFor[kube.Time](),
	reflect.TypeFor[resource.Quantity](): reflect.TypeFor[kube.Quantity](), reflect.TypeFor[intstr.IntOrString](): reflect.TypeFor[kube.IntOrString](),
	reflect.TypeFor[*meta.FieldsV1](): reflect.TypeFor[kube.Any](),
}

func sameType(t *testing.T, where string, real, ours reflect.Type) {
	t.Helper()
	switch text, known := texts[real]; {
	case known && text == ours:
	case known || real.Kind() != ours.Kind():
		t.Errorf("%s is %v of Kubernetes, and %v of canaryd", where, real, ours)
	case real.Kind() == reflect.Struct:
		want, got := fieldsOf(real), fieldsOf(ours)
		for name, field := range got {
			if of, there := want[name]; there {
				sameType(t, where+"."+name, of, field)
			} else {
				t.Errorf("%s has no field %s", where, name)
			}
		}
		for name := range want {
			if _, there := got[name]; !there {
				t.Errorf("%s: canaryd lacks %s", where, name)
			}
		}
	case real.Kind() == reflect.Map:
		sameType(t, where+".key", real.Key(), ours.Key())
		sameType(t, where, real.Elem(), ours.Elem())
	case real.Kind() == reflect.Pointer, real.Kind() == reflect.Slice:
		sameType(t, where, real.Elem(), ours.Elem())
	}
}

// fieldsOf returns the types of the fields by their JSON names.
func fieldsOf(of reflect.Type) map[string]reflect.Type {
	all := map[string]reflect.Type{}
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" && field.Anonymous {
			maps.Copy(all, fieldsOf(field.Type))
		} else {
			all[name] = field.Type
		}
	}
	return all
}
