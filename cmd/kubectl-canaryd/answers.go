package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/internal/api"
)

// The bounds on a node's JSON. A status with 100 flush records has some thousands of objects.
// An empty object is two bytes, and several hundred once it is decoded, so a bound on bytes
// does not bound memory.
const (
	mostObjects = 50_000
	mostValues  = 200_000
)

// sizes counts the objects and lists of JSON, and their values, outside of strings. tooLarge
// refuses text whose values would take too much memory, before it is decoded.
func sizes(text []byte) (objects, values int) {
	quoted := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			objects++
			values++
		case c == ',':
			values++
		}
	}
	return objects, values
}

// tooLarge reports whether JSON has more objects or values than canaryd writes.
func tooLarge(text []byte) bool {
	objects, values := sizes(text)
	return objects > mostObjects || values > mostValues
}

// read decodes canaryd's JSON. Text that is cut off, or that has more text after it, is an
// error.
func read(text []byte, into any) error {
	if tooLarge(text) {
		return errors.New("the answer has more values than canaryd writes")
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("the answer cannot be read: %w", err)
	}
	return nil
}

// statusOf returns the status in an answer to canaryd status -o json; an error makes the node
// unknown. Its exit code is 0 for a healthy node and 1 for any other, but kubectl also ends
// with 1 for troubles of its own. So the text decides, and a healthy node with another exit
// code is unknown.
func statusOf(a answer) (s api.Status, h api.Health, err error) {
	if a.err != nil {
		return s, h, a.err
	}
	if err := a.failed(); a.code > exitNo || len(a.out) == 0 {
		return s, h, errors.Join(err, noOutput(err))
	}
	if err := read(a.out, &s); err != nil {
		if a.code != 0 && a.said != "" {
			err = errors.New(a.said)
		}
		return s, h, err
	}
	h = s.Health()
	switch {
	case h.Healthy() && !s.Healthy:
		// A newer canaryd may have a reason that this program does not know.
		h = api.Health{State: api.StateUnknown, Problem: problemOf(s.Headline)}
	case h.Healthy() && a.code != 0:
		return s, h, errors.New(cmp.Or(a.said, "the answer says healthy, and the exit code does not"))
	}
	return s, h, nil
}

// noOutput is the error of an empty answer; nil if there is another error.
func noOutput(other error) error {
	if other != nil {
		return nil
	}
	return errors.New("the answer is empty")
}
