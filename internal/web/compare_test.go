package web

import (
	"bytes"
	"errors"
	"fmt"
	"html/template"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
)

// oldPage makes the page of a view by the template.
func oldPage(t *testing.T, v pageView) []byte {
	t.Helper()
	page := template.Must(template.New("page").Funcs(template.FuncMap{
		"ago":        agoText,
		"clock":      clockText,
		"cell":       cellOf,
		"runbook":    func(alert string) string { return runbook + strings.ToLower(alert) },
		"at":         func(t, now time.Time) moment { return moment{t, now} },
		"count":      countText,
		"nativeText": func(s api.Status) string { return s.NativeText(countText) },
		"iso":        func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
		"table":      api.TableCell,
		"utc":        utcText,
	}).Parse(pageText))
	v.CSS, v.Script = template.CSS(pageCSS), template.JS(pageScript)
	var text bytes.Buffer
	if err := page.Execute(&text, v); err != nil {
		t.Fatal(err)
	}
	return bytes.Map(visible, text.Bytes())
}

// bare removes the differences in bytes that make no difference in meaning.
var bare = strings.NewReplacer("&#43;", "+", ` data-live=""`, " data-live", ` hidden=""`, " hidden", "></path>", "/>", "></circle>", "/>", "></rect>", "/>",
	`"utf-8"/>`, `"utf-8">`, `scale=1"/>`, `scale=1">`, `light dark"/>`, `light dark">`, `"noindex"/>`, `"noindex">`, `<br/>`, `<br>`, `<wbr/>`, `<wbr>`, `svg%3E"/>`, `svg%3E">`)

func compare(t *testing.T, name string, v pageView) bool {
	t.Helper()
	before, after := oldPage(t, v), pageOf(t, v)
	if diff := cmp.Diff(canonical(t, before), canonical(t, after)); diff != "" {
		t.Errorf("%s (-old +new):\n%s", name, diff)
		return false
	}
	b, a := strings.TrimRight(bare.Replace(string(before)), "\n"), strings.TrimRight(bare.Replace(string(after)), "\n")
	if diff := cmp.Diff(b, a); diff != "" {
		t.Errorf("%s in bytes (-old +new):\n%s", name, diff)
		return false
	}
	return true
}

func TestCompare(t *testing.T) {
	for _, name := range goldenPages {
		golden.Compare(t, goldenName(name), masked(canonical(t, oldPage(t, viewOf(pageStates()[name], nil, "node-1", "0.1.0")))))
	}
	compare(t, "empty", viewOf(api.Status{}, nil, "", ""))
	for name, s := range pageStates() {
		compare(t, name, viewOf(s, nil, "node-1", "0.1.0"))
		compare(t, name+", dead", viewOf(s, errors.New("the <loop> has not turned"), "<node>", ""))
	}
	titles, seen := map[string]int{}, map[string]int{}
	for i := range 3000 {
		r := rand.New(rand.NewPCG(uint64(i), 0))
		s := drawStatus(r, hostile)
		var dead error
		if r.IntN(10) == 0 {
			dead = errors.New(one(r, hostile))
		}
		v := viewOf(s, dead, one(r, hostile), one(r, hostile))
		if !compare(t, fmt.Sprint("drawn ", i), v) {
			return
		}
		titles[v.Verdict.Class+": "+v.Verdict.Title]++
		for _, w := range v.Warnings {
			seen[w.Name]++
		}
	}
	t.Log(titles)
	t.Log(seen)
}
