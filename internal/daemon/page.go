package daemon

import (
	"bytes"
	_ "embed"
	"html/template"
	"net/http"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

//go:embed page.html
var pageText string

// A pageView is what page.html shows.
type pageView struct {
	Status
	NotReady string // empty if ready
	Now      time.Time
	Tables   []rules.TableName
	Rows     []pageRow
}

// A pageRow is one family's verdicts, in the order of Tables.
type pageRow struct {
	Family   rules.Family
	Verdicts []canary.Verdict
	Disabled string // why it is not watched
}

// newPage returns the page for people: the public status as HTML, with no
// script and nothing loaded from anywhere.
func newPage(snapshot func() Status) http.Handler {
	page := template.Must(template.New("page").Funcs(template.FuncMap{
		"ago": func(now, t time.Time) string { return now.Sub(t).Round(time.Second).String() },
		"seconds": func(s float64) string {
			return time.Duration(s * float64(time.Second)).Round(time.Millisecond).String()
		},
		"utc": func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 MST") },
	}).Parse(pageText))
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		var text bytes.Buffer
		if err := page.Execute(&text, viewOf(snapshot().Public(), time.Now())); err != nil {
			http.Error(w, "the page cannot be made", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write(text.Bytes())
	})
}

func viewOf(s Status, now time.Time) pageView {
	view := pageView{Status: s, Now: now, Tables: rules.Guarded()}
	if err := s.Ready(); err != nil {
		view.NotReady = err.Error()
	}
	for _, family := range rules.Families() {
		row := pageRow{Family: family, Disabled: s.DisabledFamilies[family]}
		verdicts, enabled := s.Families[family]
		if !enabled && row.Disabled == "" {
			continue
		}
		for _, table := range view.Tables {
			if v := verdicts[table]; v != "" {
				row.Verdicts = append(row.Verdicts, v)
			} else {
				row.Verdicts = append(row.Verdicts, canary.Unknown)
			}
		}
		view.Rows = append(view.Rows, row)
	}
	return view
}
