package web

import (
	"math/rand/v2"
	"reflect"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// pageTime is the time of the pages that tests compare.
var pageTime = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

// hostile are names that other processes may choose.
var hostile = []string{
	"", "", "plain", "two words", "<b>bold</b>", `"><script>alert(1)</script>`, "</style></script></title>", "a&amp;b&lt;c", "it's", `'"><img src=x onerror=alert(1)>`,
	"<!-- ", "]]>", "{{.Status}}", "\x00nul", "\x1b[2Jterminal", "a\rb", "two\nlines", "\xff\xfe", "\u2028é☃", "a+b", "`$(reboot)`", "javascript:alert(1)", "&#60;", "</table><p>", "\u009b31m",
}

// A draw fills values at random.
type draw struct {
	*rand.Rand
	names []string
}

// drawStatus returns a status with random values in all fields. Its strings are from names.
func drawStatus(r *rand.Rand, names []string) api.Status {
	var s api.Status
	draw{r, names}.fill(reflect.ValueOf(&s).Elem(), "")
	if r.IntN(2) == 0 {
		s.Stopped = false // otherwise half of the headlines would be the same
	}
	if r.IntN(2) == 0 {
		s.LossSince = time.Time{}
	}
	return s
}

// fill sets v to a random value. field is the name of the field that holds it, or "key" for the
// key of a map.
func (d draw) fill(v reflect.Value, field string) {
	r := d.Rand
	set := func(value any) { v.Set(reflect.ValueOf(value).Convert(v.Type())) }
	switch v.Interface().(type) {
	case time.Time:
		if r.IntN(3) > 0 {
			set(pageTime.Add(-time.Duration(r.Int64N(int64(time.Hour) << r.IntN(13)))))
		}
		return
	case rules.Family:
		set(one(r, rules.Families()))
		return
	case canary.Verdict:
		set(one(r, []canary.Verdict{"", canary.Intact, canary.Intact, canary.Changed, canary.Unknown, canary.Partial, canary.Refused, canary.Emptied, canary.TableDeleted, api.Removed, "<new>_verdict"}))
		return
	case api.Outcome:
		set(one(r, []api.Outcome{reload.Proved, reload.Raced, reload.Skipped, reload.Failed, api.WaitingLock, api.Pending, api.Requested, "<new> outcome"}))
		return
	}
	switch v.Kind() {
	case reflect.String:
		if v.SetString(one(r, d.names)); field == "key" {
			v.SetString(one(r, protect.Tables()))
		}
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case reflect.Int:
		v.SetInt(one(r, []int64{0, 0, 1, 2, 17, 1234567}))
	case reflect.Uint32:
		v.SetUint(one(r, []uint64{0, 1, 2, 4242}))
	case reflect.Uint8:
		v.SetUint(r.Uint64N(3))
	case reflect.Float64:
		v.SetFloat(one(r, []float64{0, 0.0042, 1.5, 7200}))
	case reflect.Pointer:
		if r.IntN(2) == 0 {
			v.Set(reflect.New(v.Type().Elem()))
			d.fill(v.Elem(), field)
		}
	case reflect.Slice:
		n := r.IntN(4)
		if field == "Flushes" && r.IntN(20) == 0 || field == "PerChain" && r.IntN(20) == 0 {
			n = 70
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			d.fill(v.Index(i), "")
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range r.IntN(4) {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			d.fill(key, "key")
			d.fill(value, "")
			v.SetMapIndex(key, value)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			d.fill(v.Field(i), v.Type().Field(i).Name)
		}
	default:
		panic("no random value of " + v.Type().String())
	}
}

// one returns one of the values.
func one[T any](r *rand.Rand, values []T) T { return values[r.IntN(len(values))] }
