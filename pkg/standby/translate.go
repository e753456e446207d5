package standby

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// vital are the chains without which no copy translates correctly.
var vital = []string{"KUBE-SERVICES", "KUBE-MARK-MASQ", "KUBE-POSTROUTING"}

// seed is the seed of all digests of this process.
var seed = maphash.MakeSeed()

// Translate makes the copy of a nat table. before is an earlier copy of the same table, or nil.
// Translate reads only the chains whose version has changed since. All errors wrap
// ErrUnavailable: the table cannot be copied. Chains to which protected rules of base chains
// lead are copied, each as a whole or not at all: see Copy.LeftOut.
func Translate(src Source, before *Copy) (*Copy, error) {
	t := &translator{src: src, before: before, reader: reader{family: src.ID.Family}}
	if before == nil || before.ID != src.ID {
		t.before = &Copy{}
	}
	t.out = &Copy{ID: src.ID, chains: make(map[string]*chain, len(t.before.chains)), rules: map[string][]rule{}, hooks: map[Hook]*hook{}}
	for _, name := range src.Chains.Bases() {
		base, _ := src.Chains.Chain(name)
		if err := t.hook(base); err != nil {
			return nil, err
		}
	}
	if len(t.out.hooks) == 0 {
		return nil, fmt.Errorf("%w: no base chain of %s has a protected rule", ErrUnavailable, src.ID)
	}
	t.reach()
	if err := t.vital(); err != nil {
		return nil, err
	}
	t.closeLeftOut()
	t.services()
	return t.out, nil
}

// services gathers the services to which base chains that translate destinations lead. If a
// packet to one of them reaches the copy's base chain, the real rules missed it; see Misses.
func (t *translator) services() {
	if t.sameServices() {
		t.out.services = t.before.services
		return
	}
	for _, h := range []Hook{Prerouting, Output} {
		if base := t.out.hooks[h]; base != nil {
			for _, to := range base.body.jumps {
				t.out.services = append(t.out.services, t.out.chains[to].services...)
			}
		}
	}
	sorting.Stable(t.out.services, key.compare)
	t.out.services = slices.Compact(t.out.services)
}

// sameServices reports whether the services are those of the earlier copy: to sort them takes 5 ms
// at 5,000 services.
func (t *translator) sameServices() bool {
	for _, h := range []Hook{Prerouting, Output} {
		was, is := t.before.hooks[h], t.out.hooks[h]
		if was == nil || is == nil {
			return false // or there are none
		}
		same := func(a, b string) bool {
			was, is := t.before.chains[a], t.out.chains[b]
			return a == b && (was == is || slices.Equal(was.services, is.services))
		}
		if !slices.EqualFunc(was.body.jumps, is.body.jumps, same) {
			return false
		}
	}
	return true
}

// vital reports why the copy cannot translate correctly; Translate then makes no copy. Chains
// that postrouting reaches must not be left out either: packets with another destination would
// be accepted there without masquerading.
func (t *translator) vital() error {
	needed := slices.Clone(vital)
	if h := t.out.hooks[Postrouting]; h != nil {
		seen := map[string]bool{}
		for next := slices.Clone(h.body.jumps); len(next) > 0; {
			name := next[0]
			if next = next[1:]; !seen[name] {
				seen[name] = true
				needed = append(needed, name)
				next = append(next, t.out.chains[name].jumps...)
			}
		}
	}
	for _, name := range needed {
		if c := t.out.chains[name]; c != nil && c.leftOut != "" {
			return fmt.Errorf("%w: chain %s: %s", ErrUnavailable, name, c.leftOut)
		}
	}
	return nil
}

type translator struct {
	src      Source
	before   *Copy
	out      *Copy
	reader   reader
	readings []reading // of a chain; the next one reuses the memory
}

// hook copies a base chain of nat, if it has a protected rule; Translate calls it for each. It
// copies rules up to the last protected one. An error means that there can be no copy: a
// protected rule is unknown. A rule of another owner before ours only blocks the hook
// (hook.blocked).
func (t *translator) hook(src nft.RawChain) error {
	name, base := src.Name, src.Base
	if base.Kind != "nat" || !slices.Contains(Hooks(), Hook(base.Hook)) {
		return nil
	}
	h := &hook{name: name, priority: base.Priority, body: &chain{}}
	var rules []nft.Rule
	last := -1 // the last protected rule
	for raw := range src.Rules {
		if of, counts := fingerprint(t.src.ID.Family, raw); counts {
			ours := t.ours(raw)
			if ours {
				last = len(rules)
			}
			rules = append(rules, raw.Clone())
			h.real, h.ours = append(h.real, of), append(h.ours, ours)
		}
	}
	switch {
	case last < 0:
		return nil
	case src.LeftOut:
		return fmt.Errorf("%w: base chain %s has too many rules to be kept", ErrUnavailable, name)
	case t.out.hooks[Hook(base.Hook)] != nil:
		return fmt.Errorf("%w: two base chains at hook %s", ErrUnavailable, Hook(base.Hook))
	}
	for i, raw := range rules[:last+1] {
		if h.ours[i] {
			read, err := readRule(t.src.ID.Family, raw)
			if err == nil && read.to != "" {
				read.to, err = t.leads(read.to)
			}
			if err != nil {
				return fmt.Errorf("%w: a protected rule of %s: %w", ErrUnavailable, name, err)
			}
			h.rules = h.body.add(h.rules, read)
		} else if err := t.others(h, raw); err != nil && h.blocked == "" {
			h.blocked = fmt.Sprintf("another owner's rule before ours in %s: %v", name, err)
		}
	}
	t.out.hooks[Hook(base.Hook)] = h
	return nil
}

// others copies another owner's rule before ours, with the chains to which it leads. The copy
// accepts packets that they would translate, so no rule of ours translates these. After an
// error nothing was copied, and hook marks the hook as blocked.
func (t *translator) others(h *hook, raw nft.Rule) error {
	read, err := readShadow(t.src.ID.Family, raw)
	if err != nil {
		return err
	}
	chains := map[string]*chain{}
	if read.effect == leads {
		if err := t.shadow(read.to, chains); err != nil {
			return err
		}
	}
	h.rules = h.body.add(h.rules, read)
	maps.Copy(t.out.chains, chains)
	return nil
}

// shadow copies another owner's chain and the chains to which it leads into made, for others.
// An error means that a rule cannot be copied, or that a protected chain is reached.
func (t *translator) shadow(name string, made map[string]*chain) error {
	if made[name] != nil || t.out.chains[name] != nil {
		return nil
	}
	src, exists := t.src.Chains.Chain(name)
	if !exists || src.Base != nil || src.LeftOut || t.src.Protects(name) {
		return fmt.Errorf("chain %q %w", name, errExpression)
	}
	c := &chain{shadow: true}
	made[name] = c
	var rules []rule
	for raw := range src.Rules {
		read, err := readShadow(t.src.ID.Family, raw)
		if err == nil && read.effect == leads {
			err = t.shadow(read.to, made)
		}
		if err != nil {
			return fmt.Errorf("chain %s: %w", name, err)
		}
		rules = c.add(rules, read)
	}
	t.out.rules[name] = rules
	return nil
}

// ours reports whether a rule of a base chain is protected, even if it cannot be copied: it
// leads to a protected chain. hook copies such rules, and compare expects them in the real
// chain.
func (t *translator) ours(raw nft.Rule) bool {
	found := false
	_ = raw.Each(func(e nft.Expression) error { // an unreadable rule leads nowhere
		to := nft.AttrPath(e.Data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN)
		found = found || e.Name == "immediate" && to != nil && t.src.Protects(nft.String(to))
		return nil
	})
	return found
}

// add appends a rule to the rules of the copied chain, and notes the chains, marks and services
// that it adds. A rule without effect on packets is left out.
func (c *chain) add(rules []rule, r reading) []rule {
	if r.effect == nothing {
		return rules
	}
	c.digests = append(c.digests, r.rule.digest())
	c.marks |= r.marks
	if r.to != "" {
		c.jumps = append(c.jumps, r.to)
	}
	if !c.shadow && r.key.known() && r.key.address != "" && (r.effect == leads || r.effect == translates) {
		c.services = append(c.services, r.key)
	}
	return append(rules, r.rule)
}

// reach copies the chains to which rules of base chains lead, directly or through others. It
// also gathers the bits of the mark that they may set. Chains of other owners are copied
// already.
func (t *translator) reach() {
	if t.reachSame() {
		return
	}
	var next []string
	for _, h := range t.out.hooks {
		t.out.marks |= h.body.marks
		next = append(next, h.body.jumps...)
	}
	for len(next) > 0 {
		name := next[len(next)-1]
		next = next[:len(next)-1]
		if t.out.chains[name] != nil {
			continue
		}
		c := t.chain(name)
		t.out.chains[name] = c
		t.out.marks |= c.marks
		next = append(next, c.jumps...)
	}
}

// reachSame is reach where all chains lead where they did in the earlier copy: it copies only the
// chains that changed. It returns false if a chain leads elsewhere.
func (t *translator) reachSame() bool {
	sameJumps := func(was, is *hook) bool { return slices.Equal(was.body.jumps, is.body.jumps) }
	if !maps.EqualFunc(t.before.hooks, t.out.hooks, sameJumps) {
		return false
	}
	all, marks, shadows := maps.Clone(t.before.chains), uint32(0), len(t.out.chains)
	for name, was := range t.before.chains {
		is := was
		if was.shadow {
			is = t.out.chains[name]
			shadows--
		} else if !t.unchanged(name, was) {
			if _, exists := t.src.Chains.Chain(name); !exists {
				return false
			}
			is = t.chain(name)
		}
		if is == nil || is.shadow != was.shadow || !slices.Equal(is.jumps, was.jumps) {
			return false
		}
		if is != was {
			all[name] = is
		} else if rules := t.before.rules[name]; rules != nil {
			t.out.rules[name] = rules
		}
		marks |= is.marks
	}
	if shadows != 0 {
		return false
	}
	for _, h := range t.out.hooks {
		marks |= h.body.marks
	}
	t.out.chains, t.out.marks = all, marks
	return true
}

// chain copies a protected chain as a whole, or leaves it out with a reason; reach calls it. A
// chain whose version is that of the earlier copy is taken from there, without its rules if the
// kernel has them already.
func (t *translator) chain(name string) *chain {
	if was := t.before.chains[name]; t.unchanged(name, was) {
		if rules := t.before.rules[name]; rules != nil {
			t.out.rules[name] = rules
		}
		return was
	}
	src, _ := t.src.Chains.Chain(name)
	if src.LeftOut {
		return &chain{leftOut: "it has too many rules to be kept"}
	}
	c := &chain{version: src.Version}
	all := t.readings[:0]
	for raw := range src.Rules {
		read, err := t.reader.read(raw)
		if err == nil && read.to != "" {
			read.to, err = t.leads(read.to)
		}
		if err != nil {
			return &chain{leftOut: fmt.Sprintf("rule %d: %v", len(all)+1, err)}
		}
		all = append(all, read)
	}
	t.readings = all
	settle(all)
	rules := make([]rule, 0, len(all))
	for _, read := range all {
		rules = c.add(rules, read)
	}
	t.out.rules[name] = rules
	return c
}

// unchanged reports whether a chain is the same as in its earlier copy was, and its rules may still
// lead where they did. The kernel keeps the chains to which rules lead.
func (t *translator) unchanged(name string, was *chain) bool {
	return was != nil && was.version != 0 && was.leftOut == "" && was.version == t.src.Chains.Version(name) &&
		!slices.ContainsFunc(was.jumps, func(to string) bool { return !t.src.Protects(to) })
}

// leads returns the name of the chain to which a copied rule leads, or an error if none may. A
// chain with such a rule is left out; in a base chain, the table cannot be copied. The name is the
// source's own text. Another one for each jump would take 0.9 MB at 5,000 services.
func (t *translator) leads(to string) (name string, err error) {
	switch c, exists := t.src.Chains.Chain(to); {
	case !exists:
		return "", fmt.Errorf("chain %q, to which it leads, was not read", to)
	case c.Base != nil:
		return "", fmt.Errorf("it leads to the base chain %q", to)
	case !t.src.Protects(to):
		return "", fmt.Errorf("it leads to chain %q, which is not protected", to)
	default:
		return c.Name, nil
	}
}

// closeLeftOut gives the chains that are left out their only rule. It is Translate's last step
// for chains: the bits of the mark that rules may set are known now.
func (t *translator) closeLeftOut() {
	for name, c := range t.out.chains {
		if c.leftOut != "" {
			t.out.rules[name] = c.add(nil, reading{rule: acceptAsIs(t.out.marks), effect: ends})
		}
	}
}

// fingerprint returns one number for a rule of the real base chain, without comments and
// counters. Probe compares it with the number at the time of the copy. counts is false for a
// rule that does nothing to packets, such as a mark of canaryd's own.
func fingerprint(family tableid.Family, raw nft.Rule) (of uint64, counts bool) {
	read, err := readRule(family, raw)
	if err != nil {
		return maphash.Bytes(seed, raw.Expressions), true
	}
	return read.rule.digest(), read.effect != nothing
}

// digest returns one number for the rule, to compare it with the kernel's rule without keeping
// both. It is the same only within this process (seed).
func (r rule) digest() uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_, _ = h.Write(r.expressions) // it cannot fail
	inverted := byte(0)
	if r.compat.Inverted {
		inverted = 1
	}
	_, _ = h.Write(binary.NativeEndian.AppendUint32(nil, uint32(r.compat.Protocol)))
	_ = h.WriteByte(inverted)
	return h.Sum64()
}
