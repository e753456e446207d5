package web

import (
	"fmt"
	"strings"

	"golang.org/x/net/html"
)

// attrs are the names and values of an element's attributes. Names are constants of this package.
type attrs [][2]string

// class returns the attribute class alone, which most elements need.
func class(names string) attrs { return attrs{{"class", names}} }

// A list holds children of an element: text (string), elements (*html.Node), further lists, and
// nil for a part that the page leaves out.
type list []any

// when returns the children if the condition holds; otherwise nil.
func when(holds bool, children ...any) any {
	if !holds {
		return nil
	}
	return list(children)
}

// el returns an element with its children on one line. [html.Render] escapes text and the values
// of attributes. It writes the text of style and script unchanged, so these get constants only.
func el(tag string, a attrs, children ...any) *html.Node {
	n := &html.Node{Type: html.ElementNode, Data: tag}
	for _, pair := range a {
		n.Attr = append(n.Attr, html.Attribute{Key: pair[0], Val: strings.Map(visible, pair[1])})
	}
	add(n, list(children))
	return n
}

// block returns an element with each child on a line of its own, unless the child is nil.
func block(tag string, a attrs, children ...any) *html.Node {
	var lines list
	for _, c := range children {
		if c != nil {
			lines = append(lines, "\n", c)
		}
	}
	return el(tag, a, append(lines, "\n")...)
}

// add appends a child to n: a text, an element, or each child of a list.
func add(n *html.Node, child any) {
	switch c := child.(type) {
	case nil:
	case string:
		n.AppendChild(&html.Node{Type: html.TextNode, Data: strings.Map(visible, c)})
	case *html.Node:
		n.AppendChild(c)
	case list:
		for _, one := range c {
			add(n, one)
		}
	default:
		panic(fmt.Sprintf("a page has no place for a %T", c))
	}
}

// visible replaces characters that a terminal obeys and a browser does not show. Other processes
// choose the names of chains, and the page may be fetched with curl.
func visible(r rune) rune {
	if r < ' ' && r != '\n' && r != '\t' || 0x7f <= r && r < 0xa0 {
		return '\ufffd'
	}
	return r
}
