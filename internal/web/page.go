package web

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"html/template"
	"net/http"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// The page is one document, and loads no other files.
var (
	//go:embed page.html
	pageText string
	//go:embed page.css
	pageCSS string
	//go:embed page.js
	pageScript string
)

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

// runbook is the document with a section for each alert; hack/where.sh knows the address.
const runbook = "https://github.com/canaryd/canaryd/blob/main/docs/troubleshoot.md#"

// About names the node and the version of canaryd for the page. Both may be empty.
type About struct{ Node, Version string }

// newPage returns the page: the public status as HTML. It is complete without its script. The
// script fetches the page again and again, and moves the changes into the page on display.
// Nothing on the page changes any state.
func newPage(about About, snapshot func() api.Status, alive func() error) http.Handler {
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
	sum := sha256.Sum256([]byte(pageText + pageCSS + pageScript))
	base := pageView{
		Build: hex.EncodeToString(sum[:6]), CSS: template.CSS(pageCSS), Script: template.JS(pageScript),
		Node: about.Node, Version: about.Version, Began: time.Now(),
	}
	// The page may use its own style and script, by their digests, and may fetch itself again.
	policy := fmt.Sprintf("default-src 'none'; style-src '%s'; script-src '%s'; connect-src 'self'; img-src data:; "+
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'", digest(pageCSS), digest(pageScript))
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		var text bytes.Buffer
		if err := page.Execute(&text, base.of(snapshot().Public(), alive(), time.Now())); err != nil {
			http.Error(w, "the page cannot be made", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", policy)
		_, _ = w.Write(bytes.Map(visible, text.Bytes()))
	})
}
