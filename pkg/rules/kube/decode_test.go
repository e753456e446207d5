package kube

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// names returns the objects in order, each with its file and line.
func names(o Objects) []string {
	var all []string
	for _, s := range o.Services {
		all = append(all, o.origin[s]+" "+s.Namespace+"/"+s.Name)
	}
	for _, s := range o.Slices {
		all = append(all, o.origin[s]+" "+s.Namespace+"/"+s.Name)
	}
	for _, n := range o.Nodes {
		all = append(all, o.origin[n]+" "+n.Name)
	}
	for _, s := range o.Skipped {
		all = append(all, s.String())
	}
	return all
}

func TestDecode(t *testing.T) {
	const svc = "apiVersion: v1\nkind: Service\nmetadata: {namespace: a, name: b}\n"
	for _, c := range []struct {
		name, text string
		want       []string
		err        string
	}{
		{name: "nothing"},
		{name: "nothing but comments", text: "# a\n---\n# b\n---\n"},
		{name: "documents", text: "# first\n---\n" + svc + "--- # second\r\n" + strings.ReplaceAll(svc, "\n", "\r\n"),
			want: []string{"f:2 a/b", "f:6 a/b"}},
		{name: "byte order mark", text: "\xef\xbb\xbf" + svc, want: []string{"f:1 a/b"}},
		{name: "three dashes in a text", text: svc + "spec:\n  externalName: |\n    a\n    ---\n  type: ExternalName\n", want: []string{"f:1 a/b"}},
		{name: "JSON", text: `{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}`, want: []string{"f:1 n1"}},
		{name: "typed list", text: "apiVersion: discovery.k8s.io/v1\nkind: EndpointSliceList\nitems:\n- {metadata: {namespace: a, name: b}, addressType: IPv4, endpoints: []}",
			want: []string{"f:1 a/b"}},
		{name: "list", text: "apiVersion: v1\nkind: List\nmetadata: {resourceVersion: ''}\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: n1}}\n- {apiVersion: v1, kind: Pod, metadata: {name: p}}",
			want: []string{"f:1 n1", "f:1: Pod p: is of a kind (v1 Pod) that declares no rules: only Service, EndpointSlice and Node do (items[1])"}},
		{name: "bare items in a list of anything", text: "apiVersion: v1\nkind: List\nitems: [{metadata: {name: n1}}]",
			err: "f:1: apiVersion and kind are missing (items[0])"},
		{name: "no kind", text: "metadata: {name: n1}", err: "f:1: apiVersion and kind are missing"},
		{name: "an older version", text: "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice", err: "f:1: apiVersion discovery.k8s.io/v1beta1 of EndpointSlice is not supported"},
		{name: "not an object", text: "- 1", err: "f:1: object: is of the wrong type: array"},
		{name: "not YAML", text: svc + "---\na: [", err: "f:5: did not find expected node content"},
		{name: "a tab", text: svc + "spec:\n\tports: []\n", err: "f:5: found character that cannot start any token"},
		{name: "a field twice", text: svc + "spec: {}\nspec: {}\n", err: `f:5: key "spec" already set in map`},
		{name: "no such field", text: svc + "spec:\n  clusterIp2: 1.2.3.4\n", err: "f:1: Service a/b: clusterIp2: there is no such field"},
		{name: "a text for a number", text: svc + "spec:\n  ports:\n  - port: http\n", err: "f:1: Service a/b: spec.ports.port: is of the wrong type: string"},
		{name: "a number for a name", text: "---\napiVersion: v1\nkind: Service\nmetadata: {namespace: a, name: 5}", err: `f:1: Service a: metadata.name: is of the wrong type: number; put it in quotes, as in "1"`},
		{name: "a namespace that YAML takes for true", text: strings.Replace(svc, "namespace: a", "namespace: y", 1),
			err: `f:1: Service b: metadata.namespace: is of the wrong type: bool; YAML takes y, n, yes, no, on, off, true and false for that: put it in quotes, as in "y"`},
		{name: "a port that is neither a number nor a name", text: svc + "spec:\n  ports:\n  - targetPort: 80.5\n", err: "f:1: Service a/b: spec.ports.targetPort: is of the wrong type: number 80.5"},
		{name: "a port that is too large", text: svc + "spec:\n  ports:\n  - targetPort: 4294967296\n", err: "f:1: Service a/b: spec.ports.targetPort: is of the wrong type: number 4294967296"},
		{name: "a port's name that YAML takes for true", text: svc + "spec:\n  ports:\n  - targetPort: on\n",
			err: `f:1: Service a/b: spec.ports.targetPort: is of the wrong type: bool; YAML takes y, n, yes, no, on, off, true and false for that: put it in quotes, as in "y"`},
		{name: "a number for a time", text: "apiVersion: v1\nkind: Node\nmetadata: {name: n1, creationTimestamp: 5}", err: "f:1: Node n1: metadata.creationTimestamp: is of the wrong type: number"},
		{name: "a bool for an amount", text: "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nstatus: {capacity: {memory: on}}", err: "f:1: Node n1: status.capacity: is of the wrong type: bool"},
		{name: "a date for a time", text: "apiVersion: v1\nkind: Node\nmetadata: {name: n1, creationTimestamp: 2026-11-27}",
			err: "f:1: Node n1: metadata.creationTimestamp: is of the wrong type: string that is no time of RFC 3339"},
		{name: "an amount with a wrong unit", text: "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nstatus: {capacity: {memory: 1gi}}",
			err: "f:1: Node n1: status.capacity: is of the wrong type: string that is no quantity"},
		{name: "the second is broken", text: svc + "---\nkind: [Service]\n", err: "f:4: object: kind: is of the wrong type: array"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, err := Decode("f", []byte(c.text))
			got := ""
			if err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff(c.err, got); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.want, names(o)); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
		})
	}
}

// TestDecoder: documents appear, disappear, move and change. The result must always be the same
// as a new Decoder's, and known documents must not be decoded again.
func TestDecoder(t *testing.T) {
	service := func(name string, port int) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {namespace: a, name: %s}\nspec: {ports: [{port: %d}]}\n", name, port)
	}
	list := "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: n1}}\n- {apiVersion: v1, kind: Pod, metadata: {name: p}}\n"
	a, b, c := service("a", 1), service("b", 2), service("c", 3)
	var d *Decoder
	var before Objects
	for _, step := range []struct {
		name      string
		documents []string
		kept      int // services with the same pointers as before
	}{
		{"nothing", nil, 0},
		{"three", []string{a, b, list}, 0},
		{"nothing changed", []string{a, b, list}, 2},
		{"moved by a new one", []string{c, a, b, list}, 2},
		{"another order", []string{list, b, a, c}, 3},
		{"one changed", []string{list, service("b", 4), a, c}, 2},
		{"one and its double", []string{a, a, c}, 2},
		{"one less", []string{a}, 1},
		{"what came back is new", []string{a, b, list}, 1},
	} {
		t.Run(step.name, func(t *testing.T) {
			text := []byte("# all\n---\n" + strings.Join(step.documents, "---\n"))
			want, err := Decode("f", text)
			if err != nil {
				t.Fatal(err)
			}
			d = d.Next()
			got, err := d.Decode("f", text)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(names(want), names(got)); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(want.Services, got.Services); diff != "" {
				t.Errorf("services (-want +got):\n%s", diff)
			}
			kept := 0
			for _, s := range got.Services {
				if slices.Contains(before.Services, s) {
					kept++
				}
			}
			if kept != step.kept {
				t.Errorf("%d services are the very same as before, want %d", kept, step.kept)
			}
			before = got
		})
	}
}

// TestDecoderAfterAnError: a broken file is an error each time, and the Decoder must still know
// the documents from before.
func TestDecoderAfterAnError(t *testing.T) {
	const good = "apiVersion: v1\nkind: Node\nmetadata: {name: a}\n"
	d := (*Decoder)(nil).Next()
	first, err := d.Decode("f", []byte("---\n"+good))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		broken, err := d.Next().Decode("f", []byte("\n---\n"+good+"---\nkind: [Node]\n"))
		if err == nil || err.Error() != "f:6: object: kind: is of the wrong type: array" || broken.Nodes != nil {
			t.Errorf("decoded %v, error %v", broken.Nodes, err)
		}
	}
	mended, err := d.Next().Decode("f", []byte("\n---\n"+good))
	if err != nil || mended.Nodes[0] != first.Nodes[0] {
		t.Errorf("decoded again, error %v", err)
	}
}

// TestErrorsNameBothFiles: an error about an object that is declared twice names both files.
func TestErrorsNameBothFiles(t *testing.T) {
	var all Objects
	for name, text := range map[string]string{
		"b.yaml": "apiVersion: v1\nkind: Node\nmetadata: {name: b}\n",
		"c.yml":  "\n\n---\napiVersion: v1\nkind: Node\nmetadata: {name: b}\n",
	} {
		o, err := Decode(name, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		all.Add(o)
	}
	_, _, err := Generate(all, onNodeA(nil))
	if err == nil || !strings.Contains(err.Error(), "b.yaml:1") || !strings.Contains(err.Error(), "c.yml:3") {
		t.Errorf("%v does not name both places", err)
	}
}

// FuzzDecode decodes any text and requires an error, or rules that iptables-restore can read.
func FuzzDecode(f *testing.F) {
	text, err := os.ReadFile("testdata/everything.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	for _, doc := range documents(text) {
		f.Add(doc.text)
	}
	f.Add([]byte(`{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"ServiceList","items":[{"spec":{"clusterIP":"1.1.1.1"}}]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		o, err := Decode("f", text)
		if err != nil {
			return
		}
		g, _, err := Generate(o, onNodeA(func(o *Options) { o.MakeIPTablesUtilChains, o.ClusterCIDRs = true, []string{"10.0.0.0/8"} }))
		if err != nil {
			return
		}
		if err := rules.Validate(g); err != nil {
			t.Fatal(err)
		}
		for _, family := range rules.Families() {
			for table, s := range tableid.Of(g, family) {
				chains := map[string]bool{}
				for _, c := range s.Chains {
					if chains[c.Name] {
						t.Errorf("%s is there twice", c.Name)
					}
					chains[c.Name] = true
				}
				for _, c := range s.Chains {
					for _, r := range c.Rules {
						read, err := rules.ParseRule(r.Spec)
						if err != nil || read.Target != r.Target {
							t.Errorf("%q: read as target %q: %v", r.Spec, read.Target, err)
						}
						if strings.HasPrefix(r.Target, "KUBE-") && !chains[r.Target] {
							t.Errorf("%s %s %s jumps to a chain that is missing", family, table, r.Spec)
						}
					}
				}
			}
		}
	})
}
