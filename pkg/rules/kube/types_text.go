package kube

import (
	"encoding/json"
	"reflect"
	"regexp"
	"strings"
	"time"
)

// No rule depends on the types of this file. They keep the text, and refuse values that the API
// server refuses.

// A Time is a time of RFC 3339, or empty.
type Time string

// UnmarshalJSON reads a time of RFC 3339, or null for none. An error refuses the whole
// object.
func (t *Time) UnmarshalJSON(data []byte) error {
	var text *string
	if err := json.Unmarshal(data, &text); err != nil {
		return mistyped[Time](err)
	}
	if text == nil {
		*t = ""
		return nil
	}
	if _, err := time.Parse(time.RFC3339, *text); err != nil {
		return &json.UnmarshalTypeError{Value: "string that is no time of RFC 3339", Type: reflect.TypeFor[Time]()}
	}
	*t = Time(*text)
	return nil
}

// A Quantity is a number with a unit.
type Quantity string

// quantity is the API's syntax. Go's regular expressions take linear time.
var quantity = regexp.MustCompile(`^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$`)

// UnmarshalJSON reads a string or a number, or null for 0.
func (q *Quantity) UnmarshalJSON(data []byte) error {
	text := string(data)
	wrong := func(value string) error {
		return &json.UnmarshalTypeError{Value: value, Type: reflect.TypeFor[Quantity]()}
	}
	switch first(data) {
	case 'n':
		*q = "0"
		return nil
	case '{':
		return wrong("object")
	case '[':
		return wrong("array")
	case 't', 'f':
		return wrong("bool")
	case '"':
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
		text = strings.TrimSpace(text)
	}
	if !quantity.MatchString(text) {
		return wrong("string that is no quantity")
	}
	*q = Quantity(text)
	return nil
}

// An IntOrString is a number or a name, as JSON.
type IntOrString string

// UnmarshalJSON reads a string or a number of 32 bits. null is 0.
func (i *IntOrString) UnmarshalJSON(data []byte) error {
	var text string
	var number int32
	var err error
	switch {
	case string(data) == "null":
		*i = ""
		return nil
	case first(data) == '"':
		err = json.Unmarshal(data, &text)
	default:
		err = json.Unmarshal(data, &number)
	}
	if err != nil {
		return mistyped[IntOrString](err)
	}
	*i = IntOrString(data)
	return nil
}

// MarshalJSON returns the text of the value.
func (i IntOrString) MarshalJSON() ([]byte, error) { return []byte(i), nil }

// Any is any JSON but null.
type Any string

// UnmarshalJSON keeps the text.
func (a *Any) UnmarshalJSON(data []byte) error {
	if string(data) != "null" {
		*a = Any(data)
	}
	return nil
}

// MarshalJSON returns the text of the value.
func (a Any) MarshalJSON() ([]byte, error) { return []byte(a), nil }

// first returns the byte by which a JSON value shows its type, or 0 for an empty text. The
// UnmarshalJSON methods decide by it.
func first(data []byte) byte {
	if len(data) == 0 {
		return 0
	}
	return data[0]
}

// mistyped turns an error about the type in which T is read into an error about T.
// encoding/json adds the field to errors of its own type, if they have none.
func mistyped[T any](err error) error {
	if wrong, ok := err.(*json.UnmarshalTypeError); ok {
		return &json.UnmarshalTypeError{Value: wrong.Value, Type: reflect.TypeFor[T]()}
	}
	return err
}
