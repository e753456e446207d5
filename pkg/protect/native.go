package protect

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativePrefix begins a word of --protect that names native nftables tables.
const nativePrefix = "nft:"

// OwnTables begins the names of canaryd's own tables.
const OwnTables = "canaryd-"

// MaxNative is the greatest number of guarded native tables. Tables that a word names exactly
// have priority over tables that a glob names.
const MaxNative = 64

// A nativeGlob names native tables.
type nativeGlob struct {
	family tableid.Family // 0: each family
	name   string         // for path.Match, but a slash is an ordinary character
}

// parseNative reads a word of --protect such as nft:ip:kube-proxy, for NewSelector. Its
// error says why the word names no native table that canaryd may guard.
func parseNative(word string) (nativeGlob, error) {
	family, name, found := strings.Cut(strings.TrimPrefix(word, nativePrefix), ":")
	if !found || name == "" {
		return nativeGlob{}, fmt.Errorf("%q is not nft:FAMILY:NAME, such as nft:ip:kube-proxy", word)
	}
	f, known := tableid.FamilyOfNFT(family)
	if !known && family != "*" {
		return nativeGlob{}, fmt.Errorf("%q names no family of nftables: want ip, ip6, inet, arp, bridge, netdev or *", word)
	}
	if _, err := path.Match(name, ""); err != nil {
		return nativeGlob{}, fmt.Errorf("%q is not a glob of table names: %w", word, err)
	}
	id := f.Table(name)
	switch {
	case ofIptables(id):
		return nativeGlob{}, fmt.Errorf("%q is a table of iptables: name its chains instead", word)
	case strings.HasPrefix(name, OwnTables):
		return nativeGlob{}, fmt.Errorf("%q is a table of canaryd's own", word)
	}
	return nativeGlob{f, name}, nil
}

// ofIptables reports whether iptables-nft has a table of that name.
func ofIptables(id tableid.TableID) bool {
	return slices.Contains(rules.Families(), id.Family) && slices.Contains(rules.AllTables(), id.Name)
}

// Native reports whether the selector names native tables, even if none exists.
func (s Selector) Native() bool { return len(s.native) > 0 }

// ProtectsTable reports whether a native table is protected. Tables of iptables and canaryd's
// own are never protected, even if a glob matches.
func (s Selector) ProtectsTable(id tableid.TableID) bool {
	return MayProtectTable(id) && slices.ContainsFunc(s.native, func(g nativeGlob) bool { return g.matches(id) })
}

// MayProtectTable reports whether a table is native and can be protected: it belongs neither to
// iptables nor to canaryd.
func MayProtectTable(id tableid.TableID) bool {
	return !ofIptables(id) && !strings.HasPrefix(id.Name, OwnTables)
}

// WordFor returns the word of --protect that protects a native table: its owner's preset, or
// the table itself. canaryd detect proposes it.
func WordFor(id tableid.TableID) string {
	if preset := owners.PresetOf(id); preset != "" {
		return preset
	}
	return nativePrefix + id.Family.NFT() + ":" + id.Name
}

// WordForChain returns the word of --protect that protects a chain, for canaryd detect. This
// is its owner's preset, the form of its owner's names, or the chain itself. It is "" if no
// word can name the chain.
func WordForChain(chain string) string {
	if strings.ContainsFunc(chain, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "" // iptables-restore could not read it
	}
	if o, known := owners.OfChain(chain); known {
		if word := o.WordFor(chain); word != "" {
			return word
		}
	}
	literal := strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(chain)
	for _, word := range []string{literal, "[" + literal[:min(1, len(literal))] + "]" + literal[min(1, len(literal)):], strings.ReplaceAll(literal, ":", "?")} {
		if s, err := NewSelector([]string{word}); err == nil && s.Protects(chain) && !strings.ContainsAny(word, `,"`) {
			return word
		}
	}
	return ""
}

// OwnersDiffer reports whether two tables certainly have different owners: a process that
// deleted both is then a stranger. Owners are iptables, each owner that has a preset, and
// any other. It is false for two tables without a known owner, and for canaryd's own.
func OwnersDiffer(a, b tableid.TableID) bool {
	ownerA, knownA := ownerOf(a)
	ownerB, knownB := ownerOf(b)
	own := strings.HasPrefix(a.Name, OwnTables) || strings.HasPrefix(b.Name, OwnTables)
	return ownerA != ownerB && (knownA || knownB) && !own
}

// OwnerKnown reports whether a table's name shows its owner.
func OwnerKnown(id tableid.TableID) bool {
	_, known := ownerOf(id)
	return known
}

// ownerOf returns a word for a table's owner, for OwnersDiffer and OwnerKnown; known is
// false if the table's name does not show it.
func ownerOf(id tableid.TableID) (word string, known bool) {
	if ofIptables(id) {
		return "iptables", true
	}
	word = WordFor(id)
	return word, !strings.HasPrefix(word, nativePrefix)
}

// NamedTables returns the native tables that the selector names exactly, without a glob. The
// daemon guards at most MaxNative tables, and keeps a place for each of these.
func (s Selector) NamedTables() []tableid.TableID {
	var named []tableid.TableID
	for _, g := range s.native {
		if g.family != 0 && !strings.ContainsAny(g.name, `*?[\`) {
			named = append(named, g.family.Table(g.name))
		}
	}
	return named
}

func (g nativeGlob) matches(id tableid.TableID) bool {
	ok, _ := path.Match(flat.Replace(g.name), flat.Replace(id.Name)) // parseNative checked the pattern
	return ok && (g.family == 0 || g.family == id.Family)
}
