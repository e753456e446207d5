package rules

import (
	"fmt"
	"strings"
)

// MaxName is the longest chain name that iptables accepts and prints. nft accepts longer ones.
const MaxName = 28

// Validate reports why g may not be turned into input of iptables-restore; nil if it may. It
// guards against bad content of a file: a stored generation is then not used. It finds
// families, tables and chains that iptables does not have, chains that occur twice, and
// texts that would end a line.
func Validate(g Generation) error {
	for id, s := range g {
		if id.Family != IPv4 && id.Family != IPv6 {
			return fmt.Errorf("family %d is neither IPv4 nor IPv6", id.Family)
		}
		if len(builtin[id.Name]) == 0 {
			return fmt.Errorf("%s: there is no table %q", id.Family, id.Name)
		}
		if err := s.validate(id.Name); err != nil {
			return fmt.Errorf("%s: %w", id, err)
		}
	}
	return nil
}

// validate is Validate for the section of table t. Its error names the first bad chain, jump
// or rule.
func (s Section) validate(t TableName) error {
	stands := make(map[string]bool, len(s.Chains))
	for _, c := range s.Chains {
		if !isChainName(c.Name) || Builtin(t, c.Name) {
			return fmt.Errorf("%q cannot be a protected chain", c.Name)
		}
		if stands[c.Name] {
			return fmt.Errorf("chain %s occurs twice", c.Name)
		}
		stands[c.Name] = true
		for _, r := range c.Rules {
			if err := r.validate(); err != nil {
				return err
			}
		}
	}
	for _, h := range s.Jumps {
		if !Builtin(t, h.Chain) {
			return fmt.Errorf("%q is not a built-in chain", h.Chain)
		}
		if err := h.Rule.validate(); err != nil {
			return err
		}
	}
	return nil
}

// validate returns an error if the rule's text has a character that could end a line.
func (r Rule) validate() error {
	if strings.ContainsFunc(r.Spec, isControl) {
		return fmt.Errorf("rule %q holds a control character", r.Spec)
	}
	return nil
}

// CheckChainName returns why name cannot be the name of a chain that is not built in, or nil.
func CheckChainName(name string) error {
	switch {
	case len(name) > MaxName:
		return fmt.Errorf("%q is longer than %d characters", name, MaxName)
	case !isChainName(name):
		return fmt.Errorf("%q is not a chain name", name)
	case isBuiltinName(name):
		return fmt.Errorf("%q is a built-in chain", name)
	default:
		return nil
	}
}

// isChainName reports whether iptables, and the input of iptables-restore, allow the name.
func isChainName(name string) bool {
	return name != "" && len(name) <= MaxName && name[0] != '-' && name[0] != '!' && name[0] != ':' &&
		!strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c >= 0x7f || c == '"' })
}
