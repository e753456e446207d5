package kube

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Decode reads the YAML or JSON documents of one file. If a field is unknown or occurs twice,
// it returns an error and no objects. name is for the errors.
func Decode(name string, data []byte) (Objects, error) {
	var d Decoder
	return d.Decode(name, data)
}

// A Decoder decodes a set of files again whenever a file changes. A document that has not
// changed costs a checksum instead of 90 µs. It is not for concurrent use.
type Decoder struct {
	before, seen map[[sha256.Size]byte]Objects // by the document's checksum; without origins
}

// Next returns the Decoder for the next pass over a source's files. It knows the documents
// that d itself decoded, not the earlier documents that d only knew. d may be nil.
func (d *Decoder) Next() *Decoder {
	if d == nil {
		return &Decoder{}
	}
	return &Decoder{before: d.seen}
}

// Decode is the function Decode. The result may share objects with the results of earlier
// Decoders, so equal pointers mean equal objects.
func (d *Decoder) Decode(name string, data []byte) (Objects, error) {
	var all Objects
	for _, doc := range documents(data) {
		found, err := d.document(name, doc)
		if err != nil {
			return Objects{}, err
		}
		all.addFrom(found, name+":"+strconv.Itoa(doc.line))
	}
	return all, nil
}

// document decodes one document of file name for Decode, or returns the objects of the last
// pass if its text is the same.
func (d *Decoder) document(name string, doc document) (Objects, error) {
	sum := sha256.Sum256(doc.text)
	_, twice := d.seen[sum]
	found, known := d.before[sum]
	if !known || twice { // an object that is declared twice is two objects, each with its line
		one := decoder{file: name, line: doc.line}
		data, err := yaml.YAMLToJSONStrict(doc.text)
		if err != nil {
			return Objects{}, one.yamlError(err)
		}
		if string(data) != "null" { // else there are only comments
			err = one.object(data, "")
		}
		if err != nil {
			return Objects{}, err
		}
		found = one.objects
	}
	if d.seen == nil {
		d.seen = map[[sha256.Size]byte]Objects{}
	}
	if !twice {
		d.seen[sum] = found
	}
	return found, nil
}

// A document is one document of a YAML file, and the line on which it begins.
type document struct {
	line int
	text []byte
}

// documents splits a YAML file at lines that are "---" or begin with "--- ". Each document
// has the number of its first line, for errors and for the objects' sources. Decode calls it.
func documents(data []byte) []document {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	var all []document
	start, first, line := 0, 1, 0
	for at := 0; at < len(data); {
		line++
		next := len(data)
		if i := bytes.IndexByte(data[at:], '\n'); i >= 0 {
			next = at + i + 1
		}
		if rest, found := bytes.CutPrefix(data[at:next], []byte("---")); found && (len(rest) == 0 || bytes.IndexByte([]byte(" \t\r\n"), rest[0]) >= 0) {
			all = append(all, document{first, data[start:at]})
			start, first = at+len("---"), line
		}
		at = next
	}
	return append(all, document{first, data[start:]})
}

// A decoder decodes one document. addFrom records the place of its objects later.
type decoder struct {
	file    string
	line    int
	objects Objects
}

func (d *decoder) where() string { return d.file + ":" + strconv.Itoa(d.line) }

var yamlLine = regexp.MustCompile(`line (\d+): `)

// yamlError returns a YAML parser's error for people: with the file, and with its line
// instead of the line within the document.
func (d *decoder) yamlError(err error) error {
	text := strings.TrimPrefix(err.Error(), "error converting YAML to JSON: ")
	text = strings.Join(strings.Fields(strings.TrimPrefix(text, "yaml: ")), " ")
	line := d.line
	if found := yamlLine.FindStringSubmatch(text); found != nil {
		if n, err := strconv.Atoi(found[1]); err == nil {
			line += n - 1
		}
		text = strings.Replace(text, found[0], "", 1)
	}
	return fmt.Errorf("%s:%d: %s", d.file, line, strings.TrimPrefix(text, "unmarshal errors: "))
}

// object reads one object, or a list of objects, into d.objects. The items of a list of one
// type need no type of their own: memberOf has it, or is "". An object of an unknown kind is
// skipped; the error names a faulty one.
func (d *decoder) object(data []byte, memberOf string) error {
	var head struct {
		APIVersion string            `json:"apiVersion"`
		Kind       string            `json:"kind"`
		Items      []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return &ObjectError{Where: d.where(), Object: "object", Field: badField(err), Reason: reason(err)}
	}
	kind := head.APIVersion + " " + head.Kind
	if kind == " " {
		kind = memberOf
	}
	switch kind {
	case "v1 Service":
		return member(d, data, &d.objects.Services, kind)
	case "v1 Node":
		return member(d, data, &d.objects.Nodes, kind)
	case "discovery.k8s.io/v1 EndpointSlice":
		return member(d, data, &d.objects.Slices, kind)
	case "v1 List", "v1 ServiceList", "v1 NodeList", "discovery.k8s.io/v1 EndpointSliceList":
		for i, item := range head.Items {
			of, skipped := strings.TrimSuffix(kind, "List"), len(d.objects.Skipped)
			if err := d.object(item, of); err != nil {
				return fmt.Errorf("%w (items[%d])", err, i)
			}
			for j := range d.objects.Skipped[skipped:] {
				d.objects.Skipped[skipped+j].Reason += fmt.Sprintf(" (items[%d])", i)
			}
		}
		return nil
	}
	if head.Kind == "" || head.APIVersion == "" {
		return fmt.Errorf("%s: apiVersion and kind are missing", d.where())
	}
	if slices.Contains([]string{"Service", "EndpointSlice", "Node"}, head.Kind) && strings.HasSuffix(strings.Split(head.APIVersion, "/")[0], "k8s.io") {
		return fmt.Errorf("%s: apiVersion %s of %s is not supported", d.where(), head.APIVersion, head.Kind)
	}
	d.objects.Skipped = append(d.objects.Skipped, Skip{
		Object:  head.Kind + nameIn(data),
		Reason:  "is of a kind (" + kind + ") that declares no rules: only Service, EndpointSlice and Node do",
		Unknown: true,
	})
	return nil
}

// member decodes one object of that kind and appends it to list. object calls it. The error
// names the object and the wrong or unknown field.
func member[T any](d *decoder, data []byte, list *[]*T, kind string) error {
	object := new(T)
	strict := json.NewDecoder(bytes.NewReader(data))
	strict.DisallowUnknownFields()
	if err := strict.Decode(object); err != nil {
		_, short, _ := strings.Cut(kind, " ")
		return &ObjectError{Where: d.where(), Object: short + nameIn(data), Field: badField(err), Reason: reason(err)}
	}
	*list = append(*list, object)
	return nil
}

// nameIn returns " NAMESPACE/NAME" of an object, as far as it can be read, for errors and
// skips.
func nameIn(data []byte) string {
	var o struct {
		Metadata struct{ Namespace, Name any } `json:"metadata"`
	}
	_ = json.Unmarshal(data, &o)
	var all string
	for _, part := range []any{o.Metadata.Namespace, o.Metadata.Name} {
		if text, ok := part.(string); ok && text != "" {
			all += "/" + text
		}
	}
	return strings.Replace(all, "/", " ", 1)
}

// badField returns the field that a decoding error names; "" if it names none. It becomes
// ObjectError.Field.
func badField(err error) string {
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		return wrong.Field
	}
	if _, field, found := strings.Cut(err.Error(), "unknown field "); found {
		return strings.Trim(field, `"`)
	}
	return ""
}

// reason returns encoding/json's message for an ObjectError, without Go's type names.
func reason(err error) string {
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		return "is of the wrong type: " + wrong.Value + unquoted(wrong)
	}
	if strings.Contains(err.Error(), "unknown field ") {
		return "there is no such field"
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

// unquoted advises quotes for a text that YAML reads as a number or a bool. It gives no such
// advice for a time, a quantity or a port's number: quotes would turn the number into a name
// that no endpoint has.
func unquoted(wrong *json.UnmarshalTypeError) string {
	if wrong.Type == nil || wrong.Type.Kind() != reflect.String {
		return ""
	}
	number := strings.HasPrefix(wrong.Value, "number")
	switch {
	case wrong.Type == reflect.TypeFor[Time](), wrong.Type == reflect.TypeFor[Quantity](), number && wrong.Type == reflect.TypeFor[IntOrString]():
		return ""
	case wrong.Value == "bool":
		return "; YAML takes y, n, yes, no, on, off, true and false for that: put it in quotes, as in \"y\""
	case number:
		return "; put it in quotes, as in \"1\""
	default:
		return ""
	}
}
