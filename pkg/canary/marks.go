// Package canary answers one question: is the generation still in force? It defines the marks to
// plant, evaluates a probe of them, and judges a table that was read.
//
// The kernel does not report which rules a flush removed. So each table gets a [Mark]: a
// canary, and a witness in each built-in chain that holds jumps. The canary is a chain whose
// only rule holds a [Nonce]. Witnesses are rules with the same nonce. They do nothing to
// packets. [Marks] hold the marks of all tables: Places lists the chains to probe, and Standing
// and Verdicts evaluate the probe.
//
// Present marks do not prove that nothing changed, and lost marks do not show which rules are
// missing. [Judge] does: it compares the [Wanted] content of a table with the content that a
// read has [Seen], and returns a [Finding] with a [Verdict]. It separates a flush from a
// decision of the rules' owner, which may delete its own rules. [Verdict.Loss] reports whether
// a verdict is a loss. [Covers] reports whether an owner has put its rules back by itself.
//
// The package has values and pure functions only, without I/O and without a clock. The caller
// sets the values that depend on time, such as Seen.Over. Many goroutines may use the package.
// A table that could not be read is [Unknown], with the error in Finding.Err: it is neither
// intact nor lost.
package canary

import (
	"crypto/rand"
	"encoding/hex"
	"maps"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// DefaultChain is the name of canaryd's canary chain.
const DefaultChain = "KUBE-CANARYD-CANARY"

const (
	canaryPrefix  = "canaryd-canary:"
	witnessPrefix = "canaryd-witness:"
)

// A Nonce is 64 random bits that identify one planting. If a saved file is restored later, the
// kernel has an old nonce again.
type Nonce string

// NewNonce returns a nonce that was never used before, for each new planting and each stand-in.
func NewNonce() Nonce {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return Nonce(hex.EncodeToString(b[:]))
}

// Comment returns the comment of the canary's rule.
func (n Nonce) Comment() string { return canaryPrefix + string(n) }

// WitnessComment returns the comment of each witness.
func (n Nonce) WitnessComment() string { return witnessPrefix + string(n) }

// Rule returns the canary's only rule.
func (n Nonce) Rule() rules.Rule { return commentRule(n.Comment()) }

// Witness returns the rule of each witness.
func (n Nonce) Witness() rules.Rule { return commentRule(n.WitnessComment()) }

// commentRule returns the rule in the spelling of iptables-save: with quotes around a string
// that has other characters than letters, digits and underscores.
func commentRule(comment string) rules.Rule {
	return rules.Rule{Spec: `-m comment --comment "` + comment + `"`}
}

// standsIn reports whether these are the rules of a canary with this nonce.
func (n Nonce) standsIn(list []rules.Rule) bool {
	return len(list) == 1 && isComment(list[0], n.Comment())
}

// IsMark reports whether r is a canary's rule or a witness of any nonce.
func IsMark(r rules.Rule) bool {
	_, ok := markComment(r)
	return ok
}

// IsWitness reports whether r is a witness of any nonce.
func IsWitness(r rules.Rule) bool {
	c, ok := markComment(r)
	return ok && strings.HasPrefix(c, witnessPrefix)
}

// markComment returns the comment of a canary's rule or a witness, with any nonce; false for
// another rule.
func markComment(r rules.Rule) (string, bool) {
	if r.Target != "" || !r.Mentions("canaryd-") {
		return "", false
	}
	words, err := r.Words()
	if err != nil || len(words) != 4 || words[0] != "-m" || words[1] != "comment" || words[2] != "--comment" {
		return "", false
	}
	return words[3], IsMarkComment(words[3])
}

// IsMarkComment reports whether a comment is the comment of a mark, with any nonce.
func IsMarkComment(comment string) bool {
	return strings.HasPrefix(comment, canaryPrefix) || strings.HasPrefix(comment, witnessPrefix)
}

// A Mark is the last planting in one table: the nonce, and the built-in chains that got a
// witness. The zero Mark was never planted.
type Mark struct {
	Nonce     Nonce    `json:"nonce"`
	Witnessed []string `json:"witnessed,omitempty"`
	// Tried is a mark that may have been planted, by a write with an unknown result. A table is
	// written atomically: if the canary is present, so is the rest of its write.
	Tried *Mark `json:"tried,omitempty"`
	// Drill is the nonce of the stand-in that a drill planted when it took the canary, or
	// empty. It is kept with the mark, so that a restart in the middle of a drill does not find
	// a flush.
	Drill Nonce `json:"drill,omitempty"`
}

// Equal reports whether two marks are the same.
func (m Mark) Equal(o Mark) bool {
	tried := m.Tried == o.Tried || m.Tried != nil && o.Tried != nil && m.Tried.Equal(*o.Tried)
	return tried && m.Nonce == o.Nonce && m.Drill == o.Drill && slices.Equal(m.Witnessed, o.Witnessed)
}

// Trying returns m with the record that next may have been planted. canaryd saves it before a
// write. If canaryd is killed then, Resolve still recognises its own write.
func (m Mark) Trying(next Mark) Mark {
	next.Tried = nil
	m.Tried = &next
	return m
}

// Resolve returns the mark that a read shows to be present, and that the judge looks for. This
// is the tried mark if its canary, or the stand-in of its drill, is there, and otherwise m.
func (m Mark) Resolve(chain string, t *rules.Table) Mark {
	if m.Tried == nil {
		return m
	}
	if m.Tried.Drill == "" && m.Tried.Nonce.standsIn(t.Rules(chain)) || m.Tried.drilled(t) {
		return *m.Tried
	}
	return m
}

// standing is Resolve for a probe: the tried mark if the probe saw its canary, and otherwise m.
// chain is the canary's.
func (m Mark) standing(t rules.TableName, chain string, seen iptables.Probed) Mark {
	if m.Tried != nil && m.Tried.Drill == "" && m.Tried.isPresent(t, chain, seen) {
		return *m.Tried
	}
	return m
}

// isPresent reports whether a probe saw the canary exactly as planted. chain is the canary's.
// If not, the table is flushed, replaced or deleted.
func (m Mark) isPresent(t rules.TableName, chain string, seen iptables.Probed) bool {
	h := seen.Holdings[iptables.Place{Table: t, Chain: chain}]
	return m.Nonce != "" && h.Presence == iptables.Present && h.Rules == 1 &&
		slices.Equal(h.Comments, []string{m.Nonce.Comment()})
}

// Marks are the marks of all tables.
type Marks map[rules.TableID]Mark

// With returns m with one mark replaced.
func (m Marks) With(id rules.TableID, mark Mark) Marks {
	return tableid.With(m, id, mark)
}

// Without returns m without the mark of a table, which then needs none.
func (m Marks) Without(id rules.TableID) Marks {
	if _, there := m[id]; !there {
		return m
	}
	m = maps.Clone(m)
	delete(m, id)
	return m
}

// MarshalJSON writes marks by family and table.
func (m Marks) MarshalJSON() ([]byte, error) { return tableid.Marshal(m) }

// UnmarshalJSON reads the output of MarshalJSON.
func (m *Marks) UnmarshalJSON(data []byte) error { return tableid.Unmarshal(data, m) }

// Only returns the marks of these tables of one family, for a probe of some tables. A table
// that never got a mark is left out.
func (m Marks) Only(f rules.Family, tables []rules.TableName) Marks {
	some := Marks{}
	for _, t := range tables {
		if mark := m[f.Table(t)]; mark.Nonce != "" {
			some = some.With(f.Table(t), mark)
		}
	}
	return some
}

// Places returns the places to probe in one family: the canary, whose chain's name is chain,
// and each chain with a witness. Tried witnesses are included. No place means that no table has
// marks.
func (m Marks) Places(f rules.Family, chain string) []iptables.Place {
	var places []iptables.Place
	for _, t := range protect.Tables() {
		mark := m[f.Table(t)]
		if mark.Nonce == "" {
			continue
		}
		places = append(places, iptables.Place{Table: t, Chain: chain})
		witnessed := slices.Clone(mark.Witnessed)
		if mark.Tried != nil {
			for _, w := range mark.Tried.Witnessed {
				if !slices.Contains(witnessed, w) {
					witnessed = append(witnessed, w)
				}
			}
		}
		for _, w := range witnessed {
			places = append(places, iptables.Place{Table: t, Chain: w})
		}
	}
	return places
}

// CanaryPresent reports whether a probe saw the table's canary exactly as planted. A tried
// canary counts too.
func (m Marks) CanaryPresent(f rules.Family, t rules.TableName, chain string, seen iptables.Probed) bool {
	return m[f.Table(t)].standing(t, chain, seen).isPresent(t, chain, seen)
}

// Standing reports whether a probe saw every mark of the family exactly as it was planted.
// chain is the canary's. Present marks do not prove that nothing changed; see Judge.
func (m Marks) Standing(f rules.Family, chain string, seen iptables.Probed) bool {
	for _, v := range m.Verdicts(f, chain, seen) {
		if v != Intact {
			return false
		}
	}
	return true
}

// Verdicts returns a verdict on each table of the family by a probe alone: the state of its
// marks. The daemon opens a loss for a verdict that is one. Intact means only that the marks
// are present. Tried marks count like planted ones, because a write of canaryd that ended
// before its proof is not a flush.
func (m Marks) Verdicts(f rules.Family, chain string, seen iptables.Probed) map[rules.TableName]Verdict {
	verdicts := map[rules.TableName]Verdict{}
	for _, t := range protect.Tables() {
		mark := m[f.Table(t)]
		if mark.Nonce == "" {
			continue
		}
		mark = mark.standing(t, chain, seen)
		h := seen.Holdings[iptables.Place{Table: t, Chain: chain}]
		switch {
		case h.Presence == iptables.NoTable:
			verdicts[t] = TableDeleted
		case h.Presence == iptables.NoChain:
			verdicts[t] = ChainDeleted
		case h.Rules == 0:
			verdicts[t] = Emptied
		case !mark.isPresent(t, chain, seen):
			verdicts[t] = Replaced
		default:
			verdicts[t] = Intact
			for _, w := range mark.Witnessed {
				place := seen.Holdings[iptables.Place{Table: t, Chain: w}]
				if !slices.Contains(place.Comments, mark.Nonce.WitnessComment()) {
					verdicts[t] = JumpsMissing
				}
			}
		}
	}
	return verdicts
}
