package owners

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// A Form is the form of a chain's name: one name, a prefix and a hash, or a glob.
type Form struct {
	text  string // as in the table
	start string // each name of the form begins with it
	// of a hash
	prefix   string
	length   int // 0: any length but 0
	alphabet string
	glob     bool
}

// alphabets are the alphabets of hashes in names.
var alphabets = map[string]string{
	"base32": "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567",
	"hex":    "0123456789abcdef",
	"HEX":    "0123456789ABCDEF",
	"digits": "0123456789",
}

// forms reads names of chains. "KUBE-SVC-<base32:16>" ends with 16 digits of base32,
// "CNI-DN-<hex>" with any number of hexadecimal digits. A name with an asterisk is a glob for
// path.Match. All others are single names: a glob such as KUBE-* would include kube-router's
// chains.
func forms(names ...string) []Form {
	var list []Form
	for _, text := range names {
		f := Form{text: text, prefix: text}
		switch prefix, hash, found := strings.Cut(text, "<"); {
		case found:
			alphabet, length, _ := strings.Cut(strings.TrimSuffix(hash, ">"), ":")
			f.prefix, f.alphabet = prefix, alphabets[alphabet]
			f.length, _ = strconv.Atoi(length) // TestTheTableIsSound reads each
		case strings.Contains(text, "*"):
			f.glob = true
		}
		f.start = f.prefix
		if f.glob {
			f.start = text[:strings.IndexAny(text, `*?[\`)]
		}
		list = append(list, f)
	}
	return list
}

// Exact returns the name if the form is a single name.
func (f Form) Exact() (name string, ok bool) { return f.prefix, f.alphabet == "" && !f.glob }

// Matches reports whether a chain's name has the form. Then the chain is its owner's: a
// preset protects it, and status names the owner.
func (f Form) Matches(chain string) bool {
	switch {
	case f.glob:
		ok, err := path.Match(f.text, chain)
		return ok && err == nil
	case f.alphabet == "":
		return chain == f.prefix
	}
	rest, ok := strings.CutPrefix(chain, f.prefix)
	if !ok || rest == "" || f.length != 0 && len(rest) != f.length {
		return false
	}
	for i := range len(rest) {
		if strings.IndexByte(f.alphabet, rest[i]) < 0 {
			return false
		}
	}
	return true
}

// AnyMatches reports whether a chain's name has any of the forms. It is called for the target
// of each rule of a node, and most names do not even begin like a form.
func AnyMatches(list []Form, chain string) bool {
	for i := range list {
		if f := &list[i]; strings.HasPrefix(chain, f.start) && f.Matches(chain) {
			return true
		}
	}
	return false
}

// resembles reports whether a chain that a glob of --protect names may have the form with
// another hash, as in another version of the owner. EmptyingOf calls it. A hash has no
// hyphen: CNI-HOSTPORT-NEW is another chain of portmap, and not a container's.
func (f Form) resembles(chain string) bool {
	if f.alphabet == "" {
		return f.Matches(chain)
	}
	rest, ok := strings.CutPrefix(chain, f.prefix)
	return ok && rest != "" && !strings.ContainsFunc(rest, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	})
}

// String returns the form as it is written in documents: KUBE-SVC-HASH.
func (f Form) String() string {
	if f.alphabet == "" {
		return f.text
	}
	return f.prefix + "HASH"
}

// check returns why the form is not valid; nil if it is. Only a test calls it, for each row
// of the table of owners.
func (f Form) check() error {
	if f.text == "" || strings.ContainsAny(f.prefix, "<>") || strings.Contains(f.text, "<") && f.alphabet == "" {
		return fmt.Errorf("%q is no form of a name", f.text)
	}
	_, err := path.Match(f.prefix, "")
	return err
}
