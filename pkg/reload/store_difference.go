package reload

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A difference holds the parts of a generation that differ from a base.
type difference map[rules.TableID]sectionDifference

// MarshalJSON writes differences by family and table.
func (d difference) MarshalJSON() ([]byte, error) { return tableid.Marshal(d) }

// UnmarshalJSON reads the text of MarshalJSON.
func (d *difference) UnmarshalJSON(data []byte) error { return tableid.Unmarshal(data, d) }

// A sectionDifference has a section's chains and jumps as pieces of the base's. The rest of the
// section is small and complete.
type sectionDifference struct {
	Chains []piece[chainDifference] `json:"chains,omitempty"`
	Jumps  []piece[rules.Jump]      `json:"jumps,omitempty"`
	rules.Section
}

// A chainDifference is a chain that the base lacks, or has with other rules. Its rules are pieces
// of the base's chain of that name.
type chainDifference struct {
	Name   string          `json:"name"`
	Policy string          `json:"policy,omitempty"`
	Rules  []piece[string] `json:"rules,omitempty"`
}

// A piece of a list is a run of elements of the base's list, in JSON [from,count], or one new
// element.
type piece[T any] struct {
	from, count int
	made        *T
}

// MarshalJSON writes [from,count] for elements of the base, or else the new element.
func (p piece[T]) MarshalJSON() ([]byte, error) {
	if p.made == nil {
		return json.Marshal([2]int{p.from, p.count})
	}
	return json.Marshal(p.made)
}

// UnmarshalJSON reads a run [from,count] or a new element. Another list or an unknown field is
// an error: the generation's file is corrupt.
func (p *piece[T]) UnmarshalJSON(text []byte) error {
	if text[0] == '[' {
		var run []int
		if err := json.Unmarshal(text, &run); err != nil {
			return err
		}
		if len(run) != 2 || run[0] < 0 || run[1] < 1 {
			return fmt.Errorf("%v is no run of a list", run)
		}
		*p = piece[T]{from: run[0], count: run[1]}
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	*p = piece[T]{made: new(T)}
	return decoder.Decode(p.made)
}

// expand returns the list that pieces make of from, the base's list. element converts a new
// element. It takes each element of the base at most once, so that a small file cannot become a
// large list. apply uses it for chains, their rules and jumps.
func expand[T, E any](pieces []piece[T], from []E, element func(T) (E, error)) ([]E, error) {
	taken := make([]bool, len(from))
	var list []E
	for _, p := range pieces {
		if p.made != nil {
			e, err := element(*p.made)
			if err != nil {
				return nil, err
			}
			list = append(list, e)
			continue
		}
		if p.from > len(from) || p.count > len(from)-p.from {
			return nil, fmt.Errorf("there is no run [%d,%d] of %d", p.from, p.count, len(from))
		}
		for i := p.from; i < p.from+p.count; i++ {
			if taken[i] {
				return nil, fmt.Errorf("the run [%d,%d] was taken before", p.from, p.count)
			}
			taken[i] = true
		}
		list = append(list, from[p.from:p.from+p.count]...)
	}
	return list, nil
}

// apply returns the generation that d makes of a base. resolve calls it to load a generation;
// an error means that its file is corrupt.
func (d difference) apply(to rules.Generation) (rules.Generation, error) {
	g := rules.Generation{}
	for id, change := range d {
		section, err := change.apply(to[id])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", id, err)
		}
		g = g.With(id, section)
	}
	return g, nil
}

// apply returns the section that d makes of to, the section of the base. resolve needs it to
// load a generation. An error means a corrupt file: a run that the base lacks, a piece that is
// taken twice, or a malformed rule.
func (d sectionDifference) apply(to rules.Section) (rules.Section, error) {
	byName := make(map[string][]rules.Rule, len(to.Chains))
	for _, c := range to.Chains {
		byName[c.Name] = c.Rules
	}
	section := d.Section
	var err error
	section.Jumps, err = expand(d.Jumps, to.Jumps, func(h rules.Jump) (rules.Jump, error) { return h, nil })
	if err != nil {
		return rules.Section{}, fmt.Errorf("jumps: %w", err)
	}
	section.Chains, err = expand(d.Chains, to.Chains, func(c chainDifference) (rules.Chain, error) {
		list, err := expand(c.Rules, byName[c.Name], rules.ParseRule)
		if err != nil {
			return rules.Chain{}, fmt.Errorf("chain %s: %w", c.Name, err)
		}
		delete(byName, c.Name) // a chain is taken at most once, too
		return rules.Chain{Name: c.Name, Policy: c.Policy, Rules: list}, nil
	})
	return section, err
}

// size estimates how many bytes d takes on disk. If that is too much, encode writes another
// base.
func (d difference) size() int64 {
	const run = len(`[12345,12345],`)
	n := 0
	for _, section := range d {
		for _, h := range section.Jumps {
			if n += run; h.made != nil {
				n += jumpSize(*h.made)
			}
		}
		for _, c := range section.Chains {
			if n += run; c.made == nil {
				continue
			}
			n += len(`{"name":"","rules":[]}`) + len(c.made.Name)
			for _, r := range c.made.Rules {
				if n += run; r.made != nil {
					n += len(*r.made)
				}
			}
		}
	}
	return int64(n)
}

// jumpSize estimates how many bytes a jump takes on disk.
func jumpSize(h rules.Jump) int {
	return len(`{"chain":"","rule":"","anchor":{"position":"bottom","neighbour":""}}`) + len(h.Chain) + len(h.Rule.Spec) + len(h.Anchor.Neighbour.Spec)
}

// A fingerprint of a base is enough to find the differences from it, without its text: 24 bytes a
// chain and 8 a rule. Two texts with the same 64-bit hash are practically impossible. If they
// occur, the ID of the stored generation does not match, and loading it fails.
type fingerprint map[rules.TableID]sectionPrint

type sectionPrint struct {
	chains []uint64 // hashes of name, policy and rules
	names  []uint64
	starts []int    // for each chain, the index in rules of its first rule; at last, len(rules)
	rules  []uint64 // hashes of the rules' text
	jumps  []uint64
}

var seed = maphash.MakeSeed()

func hashText(text string) uint64 { return maphash.String(seed, text) }

// hashChain returns the hash of a chain, and appends the hashes of its rules to all. An equal
// chain of the base need not be stored again; in another one its equal rules need not.
func hashChain(c rules.Chain, all []uint64) (uint64, []uint64) {
	var h maphash.Hash
	h.SetSeed(seed)
	var bytes [8]byte
	write := func(hash uint64) {
		binary.LittleEndian.PutUint64(bytes[:], hash)
		_, _ = h.Write(bytes[:])
	}
	write(hashText(c.Name))
	write(hashText(c.Policy))
	for _, r := range c.Rules {
		hash := hashText(string(r.Key()))
		write(hash)
		all = append(all, hash)
	}
	return h.Sum64(), all
}

// hashJumps returns the hash of each jump with its anchor, for a base and for a generation that
// is compared with it.
func hashJumps(jumps []rules.Jump) []uint64 {
	hashes := make([]uint64, len(jumps))
	for i, h := range jumps {
		hashes[i] = hashText(fmt.Sprintf("%q %q %q %q %t", h.Chain, h.Rule.Key(), h.Anchor.Position, h.Anchor.Neighbour.Key(), h.Named))
	}
	return hashes
}

// fingerprintOf returns the fingerprint of a generation that becomes a base. The next
// generations are compared with it.
func fingerprintOf(g rules.Generation) fingerprint {
	all := fingerprint{}
	for id, section := range g {
		n := len(section.Chains)
		p := sectionPrint{
			chains: make([]uint64, 0, n), names: make([]uint64, 0, n), starts: make([]int, 1, n+1),
			rules: make([]uint64, 0, section.RuleCount()), jumps: hashJumps(section.Jumps),
		}
		for _, c := range section.Chains {
			var hash uint64
			hash, p.rules = hashChain(c, p.rules)
			p.chains, p.names, p.starts = append(p.chains, hash), append(p.names, hashText(c.Name)), append(p.starts, len(p.rules))
		}
		all[id] = p
	}
	return all
}

// difference returns the difference between g and the base with this fingerprint, for encode.
func (p fingerprint) difference(g rules.Generation) difference {
	d := difference{}
	for id, section := range g {
		d[id] = p[id].difference(section)
	}
	return d
}

// difference returns the pieces that make section of the base's section. p has only the hashes
// of the latter. The zero sectionPrint is an empty base: then every piece is new.
func (p sectionPrint) difference(section rules.Section) sectionDifference {
	now, scratch := make([]uint64, len(section.Chains)), []uint64{}
	for i, c := range section.Chains {
		now[i], scratch = hashChain(c, scratch[:0])
	}
	var byName map[uint64]int
	d := sectionDifference{Section: section}
	d.Section.Chains, d.Section.Jumps = nil, nil
	d.Jumps = pieces(p.jumps, hashJumps(section.Jumps), func(i int) rules.Jump { return section.Jumps[i] })
	d.Chains = pieces(p.chains, now, func(i int) chainDifference {
		if byName == nil {
			byName = make(map[uint64]int, len(p.names))
			for k, name := range p.names {
				byName[name] = k
			}
		}
		c := section.Chains[i]
		var before []uint64
		if k, ok := byName[hashText(c.Name)]; ok {
			before = p.rules[p.starts[k]:p.starts[k+1]]
		}
		_, scratch = hashChain(c, scratch[:0])
		list := pieces(before, scratch, func(i int) string { return c.Rules[i].Spec })
		return chainDifference{Name: c.Name, Policy: c.Policy, Rules: list}
	})
	return d
}

// pieces returns the list now as pieces of the base's list from, both given by their hashes.
// element returns the i-th element of now, which the base lacks. expand is the reverse.
func pieces[T any](from, now []uint64, element func(i int) T) []piece[T] {
	places := &places{list: from, taken: make([]bool, len(from))}
	var list []piece[T]
	next := 0 // where the current run would continue
	for i, hash := range now {
		at, ok := places.take(hash, next)
		if !ok {
			made := element(i)
			list = append(list, piece[T]{made: &made})
			continue
		}
		if n := len(list); n > 0 && list[n-1].made == nil && list[n-1].from+list[n-1].count == at {
			list[n-1].count++
		} else {
			list = append(list, piece[T]{from: at, count: 1})
		}
		next = at + 1
	}
	return list
}

// places finds the places of a hash in a list. It takes each place once.
type places struct {
	list  []uint64
	taken []bool
	order []int          // places sorted by their hashes; made when it is first needed
	first map[uint64]int // for a hash, where in order to begin
}

// take takes a free place of the hash. It prefers best, which continues the current run of a
// piece. It returns false if no place is free: then the element is new.
func (p *places) take(hash uint64, best int) (int, bool) {
	if best < len(p.list) && p.list[best] == hash && !p.taken[best] {
		p.taken[best] = true
		return best, true
	}
	if len(p.list) == 0 {
		return 0, false
	}
	if p.order == nil {
		p.order, p.first = make([]int, len(p.list)), map[uint64]int{}
		for i := range p.order {
			p.order[i] = i
		}
		slices.SortFunc(p.order, func(a, b int) int { return cmp.Or(cmp.Compare(p.list[a], p.list[b]), cmp.Compare(a, b)) })
	}
	at, known := p.first[hash]
	if !known {
		at, _ = slices.BinarySearchFunc(p.order, hash, func(i int, hash uint64) int { return cmp.Compare(p.list[i], hash) })
	}
	for at < len(p.order) && p.list[p.order[at]] == hash && p.taken[p.order[at]] {
		at++
	}
	p.first[hash] = at // so a rule with a thousand copies takes one pass
	if at == len(p.order) || p.list[p.order[at]] != hash {
		return 0, false
	}
	p.taken[p.order[at]] = true
	return p.order[at], true
}
