package ruleset

import (
	"crypto/sha256"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// Label returns a rule in words for people, as far as possible. It writes an extension or
// expression that Words does not know as its name, with a digest of its data in brackets. The
// arguments are the same as for Words.
func Label(family tableid.Family, expressions []byte, sets []string) string {
	d := decoder{family: family, sets: sets}
	for rest := (fields{rest: expressions}); len(rest.rest) > 0; {
		e := rest.nested(unix.NFTA_LIST_ELEM)
		name, data := e.text(unix.NFTA_EXPR_NAME), e.nested(unix.NFTA_EXPR_DATA)
		if rest.bad || e.bad {
			d.unknown("", rest.rest)
			break
		}
		before, content := d.copy(), data.rest
		d.counted = d.counted || name == "immediate" || name == "target" // nft writes a counter on request only
		if !d.expression(name, &data) || !data.done() {
			if name != EntryHead { // whose other conditions have words
				d = before
			}
			d.unknown(name, content)
		}
	}
	if !d.closeTransport() || d.loaded != nothing {
		d.unknown("", nil)
	}
	return d.words()
}

// copy returns a copy of the decoder that later changes of the original do not affect. Label
// restores it where an expression failed halfway.
func (d *decoder) copy() decoder {
	c := *d
	for _, text := range []*[]byte{&c.source, &c.destination, &c.in, &c.out, &c.proto, &c.matches, &c.target, &c.mask, &c.fragments, &c.native.source, &c.native.destination, &c.native.flags} {
		*text = slices.Clip(*text)
	}
	return c
}

// unknown appends an expression that has no words: its name, or that of its extension, and a
// digest of data. Label calls it; name "" is an unreadable rest, printed as "?". Names of
// ipsets that the extension takes from d.sets follow the digest.
func (d *decoder) unknown(name string, data []byte) {
	_ = d.closeTransport() // the comparison so far has words
	d.loaded, d.mask = nothing, nil
	said, sum := &d.matches, sha256.Sum256(data)
	if d.counted {
		said = &d.target
	}
	f := fields{rest: data}
	if extension := f.text(unix.NFTA_MATCH_NAME); (name == "match" || name == "target") && !f.bad && plainName([]byte(extension)) {
		*said = fmt.Appendf(*said, " %s %s [%x", map[string]string{"match": "-m", "target": "-j"}[name], extension, sum[:4])
		places := map[string]int{"set": 1, "SET": 3}[extension]
		for _, set := range d.sets[:min(places, len(d.sets))] {
			if set != "" {
				*said = fmt.Appendf(*said, " %q", set)
			}
		}
		d.sets, *said = d.sets[min(places, len(d.sets)):], append(*said, ']')
		return
	}
	if name == EntryHead {
		name = "conditions"
	} else if !plainName([]byte(name)) {
		name = "?"
	}
	*said = fmt.Appendf(*said, " [%s %x]", name, sum[:4])
}
