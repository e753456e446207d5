package protect

import (
	"crypto/sha512"
	"encoding/hex"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An Attachment is a container's connection to a CNI network. The plugin portmap and the option
// ipMasq name it in the comments of their rules.
type Attachment struct {
	Network   string `json:"network"`
	Container string `json:"container"`
}

// cniComment matches the comments of the plugins bridge and ptp (with ipMasq) and portmap. Its
// form is from containernetworking/plugins: FormatComment in pkg/utils, and
// plugins/meta/portmap.
var cniComment = regexp.MustCompile(`^(?:[a-z]+ )?name: "([^"\\]+)" id: "([^"\\]+)"$`)

// AttachmentOf returns the attachment that a rule's comment names; false if the rule belongs
// to none. It shows whether a rule belongs to a container that is gone.
func AttachmentOf(r rules.Rule) (Attachment, bool) {
	if !r.Mentions("id: ") {
		return Attachment{}, false
	}
	comment, _ := r.Comment()
	found := cniComment.FindStringSubmatch(comment)
	if found == nil {
		return Attachment{}, false
	}
	return Attachment{Network: strings.Clone(found[1]), Container: strings.Clone(found[2])}, true
}

// cniHashed are the forms of the chains that CNI plugins make for single containers, and
// portmapHashed are portmap's forms.
var cniHashed, portmapHashed = owners.ContainerChains()

// chains returns the names of the chains that CNI plugins make for this attachment alone.
// Detach removes them, and Lacking looks for them. Each is a prefix and a digest, cut to the
// 28 characters of a chain's name.
func (a Attachment) chains() []string {
	sum := sha512.Sum512([]byte(a.Network + a.Container))
	digest := hex.EncodeToString(sum[:])
	return []string{"CNI-DN-" + digest[:21], "CNI-SN-" + digest[:21], "CNI-" + digest[:24]}
}

// IsCNIChain reports whether CNI plugins write a chain of that name. Only in such chains are
// comments read as comments of CNI plugins.
func IsCNIChain(chain string) bool { return strings.HasPrefix(chain, "CNI-") }

// Attachments returns the attachments named by the section's rules, of CNI plugins' chains
// only; nil if there are none. They show which containers have rules.
func Attachments(s rules.Section) map[Attachment]bool {
	var all map[Attachment]bool
	note := func(r rules.Rule) {
		if a, ok := AttachmentOf(r); ok {
			if all == nil {
				all = map[Attachment]bool{}
			}
			all[a] = true
		}
	}
	for _, c := range s.Chains {
		if IsCNIChain(c.Name) {
			for _, r := range c.Rules {
				note(r)
			}
		}
	}
	for _, h := range s.Jumps {
		if IsCNIChain(h.Into()) {
			note(h.Rule)
		}
	}
	return all
}

// Detach returns the section without the rules of these attachments, and without the chains
// that belong to them alone. s does not change. A replay does not put back rules of
// containers that are gone.
func Detach(s rules.Section, gone map[Attachment]bool) rules.Section {
	if len(gone) == 0 {
		return s
	}
	drop := func(r rules.Rule) bool {
		a, ok := AttachmentOf(r)
		return ok && gone[a]
	}
	// A chain is theirs by its name, because a rule of theirs led to it, or because it held
	// only their rules. The name decides if the owner has already removed the jump.
	theirs := map[string]bool{}
	for a := range gone {
		for _, name := range a.chains() {
			theirs[name] = true
		}
	}
	next := s
	next.Jumps = slices.DeleteFunc(slices.Clone(s.Jumps), func(h rules.Jump) bool {
		out := IsCNIChain(h.Into()) && drop(h.Rule)
		theirs[h.Into()] = theirs[h.Into()] || out
		return out
	})
	next.Chains = nil
	for _, c := range s.Chains {
		if IsCNIChain(c.Name) && slices.ContainsFunc(c.Rules, drop) {
			kept := rules.Chain{Name: c.Name, Policy: c.Policy}
			for _, r := range c.Rules {
				if drop(r) {
					theirs[r.Target] = true
				} else {
					kept.Rules = append(kept.Rules, r)
				}
			}
			theirs[c.Name] = theirs[c.Name] || len(kept.Rules) == 0
			c = kept
		}
		next.Chains = append(next.Chains, c)
	}
	led := targets(next)
	next.Chains = slices.DeleteFunc(next.Chains, func(c rules.Chain) bool {
		return theirs[c.Name] && anyMatches(cniHashed, c.Name) && !led[c.Name]
	})
	return next
}

// targets returns the chains that rules of CNI chains, and the section's jumps, lead to.
// Detach keeps them.
func targets(s rules.Section) map[string]bool {
	led := map[string]bool{}
	for _, c := range s.Chains {
		if IsCNIChain(c.Name) {
			for _, r := range c.Rules {
				led[r.Target] = true
			}
		}
	}
	for _, h := range s.Jumps {
		led[h.Into()] = true
	}
	return led
}

// AllAttachments returns the attachments named by the generation's rules, and the known ones
// that have a chain there but no rule. The daemon watches the containers of these.
func AllAttachments(g rules.Generation, known iter.Seq[Attachment]) map[Attachment]bool {
	all, chains := map[Attachment]bool{}, map[string]bool{}
	for id, s := range g {
		if id.Name != rules.Nat {
			continue
		}
		maps.Copy(all, Attachments(s))
		for _, c := range s.Chains {
			if IsCNIChain(c.Name) {
				chains[c.Name] = true
			}
		}
	}
	for a := range known {
		if slices.ContainsFunc(a.chains(), func(name string) bool { return chains[name] }) {
			all[a] = true
		}
	}
	return all
}

// DetachAll returns the generation without the rules of these attachments, as Detach does.
// It removes containers that are gone from the learned generation and from a replay's.
func DetachAll(g rules.Generation, gone map[Attachment]bool) rules.Generation {
	if len(gone) == 0 {
		return g
	}
	for id, s := range g {
		if id.Name == rules.Nat {
			g = g.With(id.Family.Table(rules.Nat), Detach(s, gone))
		}
	}
	return g
}
