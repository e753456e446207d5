package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ownComment begins the comments of canaryd's own rules, which are no evidence.
const ownComment = "canaryd-"

// hintChains are the chains in mangle that kubelet writes to show the backend that it uses.
// KUBE-IPTABLES-HINT exists since kubelet 1.24; iptables-wrappers look for both.
var hintChains = []string{owners.HintChain, owners.KubeletCanary}

// A ChooseConfig holds the settings of Choose.
type ChooseConfig struct {
	Families []rules.Family // nil means both
	Canary   string         // the name of canaryd's own chain, which is no evidence; may be ""
}

// Choose decides which backend is in use on this machine, with one decision for both families.
// It executes nothing, creates nothing, and needs CAP_NET_ADMIN (ErrPermission without).
// Evidence describes the decision. An unreadable table is an error and never counts as "no
// evidence": the caller should try again later.
func Choose(ctx context.Context, cfg ChooseConfig) (Evidence, error) {
	if cfg.Families == nil {
		cfg.Families = rules.Families()
	}
	evidence := Evidence{Counts: map[rules.Family]map[Backend]Count{}}
	for _, family := range cfg.Families {
		evidence.Counts[family] = map[Backend]Count{}
	}
	if slices.Contains(cfg.Families, rules.IPv6) && haveIPv6() != nil {
		cfg.Families = slices.DeleteFunc(slices.Clone(cfg.Families), func(f rules.Family) bool { return f == rules.IPv6 })
	}
	var err error
	// The stamps are taken before the count, so that a later look finds any change meanwhile.
	if evidence.stamps, err = stampBackends(cfg.Families); err != nil {
		return Evidence{}, fmt.Errorf("choosing the backend: %w", err)
	}
	hasNFT, err := countNFT(ctx, cfg, evidence.Counts)
	if err != nil {
		return Evidence{}, fmt.Errorf("choosing the backend: %w", err)
	}
	if err := countLegacy(ctx, cfg, evidence.Counts); err != nil {
		return Evidence{}, fmt.Errorf("choosing the backend: %w", err)
	}
	evidence.Decide(hasNFT)
	return evidence, nil
}

// countNFT counts nf_tables' rules in iptables' tables into counts, for Choose. ok is false if
// the kernel has no nf_tables; that is no error.
func countNFT(ctx context.Context, cfg ChooseConfig, counts map[rules.Family]map[Backend]Count) (ok bool, err error) {
	conn, _, err := nft.DialIfAny()
	if conn == nil {
		return false, err
	}
	defer conn.Close()
	for _, family := range cfg.Families {
		counts[family][NFT], err = countNFTFamily(ctx, conn, family, cfg.Canary)
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// countNFTFamily reads the hint chains by name, and the rules table by table, for countNFT. One
// list of all chains could replace both. But while another process writes, such a list may miss
// chains of other tables, even a hint chain. Rules of the chain canary do not count.
func countNFTFamily(ctx context.Context, conn *nft.Conn, family rules.Family, canary string) (Count, error) {
	var count Count
	for _, name := range hintChains {
		is, err := conn.HasChain(family, rules.Mangle, name)
		if err != nil {
			return Count{}, err
		}
		count.Hint = count.Hint || is
	}
	for _, table := range rules.AllTables() {
		if err := ctx.Err(); err != nil {
			return Count{}, err
		}
		n, err := countNFTTable(conn, family, table, canary)
		if err != nil {
			return Count{}, fmt.Errorf("counting the rules of table %s: %w", table, err)
		}
		count.Rules += n
	}
	return count, nil
}

// countTries is how often canaryd counts a table while another process writes. A busy writer
// disturbs every count of a large table, and then the highest count is near enough.
const countTries = 3

// countNFTTable counts the rules of one table of nf_tables for countNFTFamily, without
// canaryd's own. While another process writes, the count is incomplete; after countTries it
// returns the highest.
func countNFTTable(conn *nft.Conn, family rules.Family, table rules.TableName, canary string) (int, error) {
	most := 0
	for range countTries {
		n := 0
		err := conn.EachRuleIn(family, table, func(m nft.RuleMessage) error {
			meaning, err := meaningOf(m.Rule)
			if !isOwn(string(m.Chain), canary) && !strings.HasPrefix(meaning.comment, ownComment) {
				n++
			}
			return err
		})
		most = max(most, n)
		if err == nil {
			return n, nil
		}
		if !errors.Is(err, nft.ErrInterrupted) {
			return 0, err
		}
	}
	return most, nil
}

// countLegacy counts the rules and hint chains of the existing legacy tables into counts, for
// Choose. A family that the kernel lacks is no error, and has no rules.
func countLegacy(ctx context.Context, cfg ChooseConfig, counts map[rules.Family]map[Backend]Count) error {
	return eachLegacy(cfg.Families, func(s *xtSocket) error {
		if err := s.check(); err != nil {
			return err // errNoLegacy, which eachLegacy accepts
		}
		var count Count
		err := s.walk(ctx, nil, func(table rules.TableName, info xtInfo, data []byte) error {
			return count.walk(s.family, table, cfg.Canary, info, data)
		})
		if err == nil {
			counts[s.family][Legacy] = count
		}
		return err
	})
}

// eachLegacy calls f with a socket for each family that the kernel has, to count or to stamp
// its tables. errNoLegacy, also from f, is no error: that family has no rules.
func eachLegacy(families []rules.Family, f func(*xtSocket) error) error {
	for _, family := range families {
		s, err := openXT(family)
		if err == nil {
			err = f(s)
			s.close()
		}
		if err != nil && !errors.Is(err, ErrNoFamily) && !errors.Is(err, errNoLegacy) {
			return err
		}
	}
	return nil
}

// walk adds one legacy table to the count, for countLegacy: its rules and hint chains. Rules of
// the chain canary and rules with canaryd's comments do not count.
func (c *Count) walk(family rules.Family, table rules.TableName, canary string, info xtInfo, data []byte) error {
	own := false
	return walkEntries(family, info, data, xtVisitor{
		chain: func(name string, _ int) {
			own = isOwn(name, canary)
			c.Hint = c.Hint || table == rules.Mangle && slices.Contains(hintChains, name)
		},
		rule: func(r xtRule) {
			if !own && !bytes.HasPrefix(r.comment, []byte(ownComment)) {
				c.Rules++
			}
		},
	})
}

func isOwn(chain, canary string) bool { return canary != "" && chain == canary }
