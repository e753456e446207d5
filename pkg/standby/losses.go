package standby

import (
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Loss is the state of a hook's path through the real table.
type Loss uint8

const (
	// Intact: the path has lost nothing, or nothing is known about it.
	Intact Loss = iota
	// Below: the base chain has the rules of other owners that it had when it was copied. A
	// protected chain below it is gone or empty, or a jump to a protected chain is missing.
	Below
	// Gone: the base chain is gone or empty.
	Gone
	// Unclear: other owners' rules of the base chain differ from the copied rules.
	Unclear
)

// String returns a word for people, for the reason why Openable keeps a hook shut.
func (l Loss) String() string {
	switch l {
	case Below:
		return "protected chains are lost"
	case Gone:
		return "gone"
	case Unclear:
		return "changed by another owner"
	}
	return "intact"
}

// Openable returns the hooks that may be opened for these losses. A flow is then translated as the
// whole real table would have translated it, or not at all. shut says why each other hook with a
// loss stays shut. A flow that cannot be masqueraded must not get another destination. So if
// postrouting has a loss and must stay shut, all hooks do.
func (c *Copy) Openable(losses map[Hook]Loss) (open []Hook, shut map[Hook]string) {
	shut = map[Hook]string{}
	for _, h := range c.Hooks() {
		switch loss := losses[h]; {
		case loss == Intact:
		case loss == Unclear:
			shut[h] = fmt.Sprintf("base chain %s: %s", c.hooks[h].name, loss)
		case loss == Below && c.Blocked(h) != "":
			shut[h] = c.Blocked(h)
		default:
			open = append(open, h)
		}
	}
	if shut[Postrouting] != "" {
		for _, h := range open {
			shut[h] = "postrouting must stay shut: " + shut[Postrouting]
		}
		open = nil
	}
	return open, shut
}

// Probe reads the state of each hook's path: the base chain, and the chains to which its
// protected rules lead. Openable then chooses the hooks to open. Probe does not see losses
// further below, and in a native table only the base chains. It sends some 10 requests of 10 µs
// each.
func (c *Copy) Probe(conn *nft.Conn) (map[Hook]Loss, error) {
	losses := map[Hook]Loss{}
	emptied := map[string]bool{}
	for _, h := range c.Hooks() {
		hook := c.hooks[h]
		var now []uint64
		err := conn.EachRule(c.ID.Family, c.ID.Name, hook.name, func(m nft.RuleMessage) error {
			if of, counts := fingerprint(c.ID.Family, m.Rule); counts {
				now = append(now, of)
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("probing base chain %s: %w", hook.name, err)
		}
		losses[h] = hook.compare(now)
		for _, name := range hook.body.jumps {
			if _, asked := emptied[name]; !asked {
				if emptied[name], err = c.isEmpty(conn, name); err != nil {
					return nil, err
				}
			}
			if losses[h] == Intact && emptied[name] {
				losses[h] = Below
			}
		}
	}
	return losses, nil
}

// errARule ends the read of a chain that has a rule.
var errARule = errors.New("there is a rule")

// isEmpty reports whether a protected chain that had rules is gone or empty. Probe then finds
// the hooks whose rules lead there Below. It is false for a chain that never had rules or is
// another owner's, because such a chain is no loss.
func (c *Copy) isEmpty(conn *nft.Conn, name string) (bool, error) {
	if chain := c.chains[name]; chain == nil || chain.shadow || len(chain.digests) == 0 {
		return false, nil
	}
	_, found, err := conn.Chain(c.ID.Family, c.ID.Name, name)
	if err != nil || !found {
		return err == nil, err
	}
	err = conn.EachRule(c.ID.Family, c.ID.Name, name, func(nft.RuleMessage) error { return errARule })
	switch {
	case errors.Is(err, errARule):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("probing chain %s: %w", name, err)
	}
	return true, nil
}

// compare returns the loss of a base chain that has these rules now, by their fingerprints;
// Probe calls it. It does not see losses in the chains below, which Probe adds.
func (h *hook) compare(now []uint64) Loss {
	if len(now) == 0 {
		return Gone
	}
	// The present rules must be the copied ones, in their order. Rules of ours may be missing, and
	// rules of others behind our last one.
	last := len(h.ours) - 1
	for last > 0 && !h.ours[last] {
		last--
	}
	lacks, at := false, 0
	for i, ours := range h.ours {
		switch {
		case at < len(now) && now[at] == h.real[i]:
			at++
		case ours:
			lacks = true
		case i < last:
			return Unclear
		}
	}
	switch {
	case !lacks:
		return Intact
	case at < len(now): // a rule that may be before or behind ours
		return Unclear
	}
	return Below
}
