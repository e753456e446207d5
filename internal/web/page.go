package web

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/net/html"

	"github.com/canaryd/canaryd/internal/api"
)

// The page is one document, and loads no other files.
var (
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
//
// The page is made of elements, because html/template would keep every exported method in the
// program: 2.7 MB.
func newPage(about About, snapshot func() api.Status, alive func() error) http.Handler {
	base := pageView{Build: pageBuild(), Node: about.Node, Version: about.Version, Began: time.Now()}
	// The page may use its own style and script, by their digests, and may fetch itself again.
	policy := fmt.Sprintf("default-src 'none'; style-src '%s'; script-src '%s'; connect-src 'self'; img-src data:; "+
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'", digest(pageCSS), digest(pageScript))
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		var text bytes.Buffer
		if err := html.Render(&text, base.of(snapshot().Public(), alive(), time.Now()).document()); err != nil {
			http.Error(w, "the page cannot be made", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", policy)
		_, _ = w.Write(text.Bytes())
	})
}

// pageBuild returns a digest of the page's form. A page on display reloads itself when the digest
// changes, because its script cannot replace the style, the script, and the elements without
// data-live. The page of an empty status has all of these, so pageBuild takes the digest of that
// page, without node, version and times. The form of the other parts, such as a record, is not in
// the digest: the script follows any change of it.
func pageBuild() string {
	sum := sha256.New()
	// A hash takes all text, and TestPages renders this page.
	_ = html.Render(sum, pageView{}.of(api.Status{}, nil, time.Time{}).document())
	return hex.EncodeToString(sum.Sum(nil)[:6])
}
