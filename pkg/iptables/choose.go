package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// ownComment begins the comments of our own rules, which are no evidence.
const ownComment = "canaryd-"

// hintChains are the chains in mangle by which kubelet tells which backend it
// uses. KUBE-IPTABLES-HINT exists since kubelet 1.24; iptables-wrappers look
// for both.
var hintChains = [...]string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}

// A ChooseConfig says what Choose looks at.
type ChooseConfig struct {
	Families []rules.Family // nil means both
	Canary   string         // the name of our own chain, which is no evidence; may be ""
}

// Choose decides which backend is in use on this machine: one decision for
// both families. It executes nothing and creates nothing, and needs
// CAP_NET_ADMIN (ErrPermission without). See Evidence for how it decides. What
// cannot be read is an error, never "no evidence": ask again later.
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
	// Taken before anything is counted: what moves meanwhile is found later.
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
	evidence.decide(hasNFT)
	return evidence, nil
}

// countNFT counts nf_tables' rules in iptables' tables. ok is false if the
// kernel has no nf_tables.
func countNFT(ctx context.Context, cfg ChooseConfig, counts map[rules.Family]map[Backend]Count) (ok bool, err error) {
	conn, err := dialNFT()
	if err == nil {
		defer conn.close()
		_, err = conn.genid()
	}
	if errors.Is(err, errNoNFT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, family := range cfg.Families {
		counts[family][NFT], err = countNFTFamily(ctx, conn, family, cfg.Canary)
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

func countNFTFamily(ctx context.Context, conn *nftConn, family rules.Family, canary string) (Count, error) {
	var count Count
	var places []Place
	err := conn.eachChain(family, func(c nftChain) {
		if !slices.Contains(rules.AllTables(), c.place.Table) || isOwn(c.place.Chain, canary) {
			return
		}
		count.Hint = count.Hint || isHint(c.place)
		if c.use > 0 {
			places = append(places, c.place)
		}
	})
	if err != nil {
		return Count{}, err
	}
	// The use count includes jumps to the chain, so it cannot be compared with
	// legacy's count of rules.
	for _, place := range places {
		if err := ctx.Err(); err != nil {
			return Count{}, err
		}
		err := conn.eachRule(family, place, func(r nftRule) {
			if !strings.HasPrefix(r.comment, ownComment) {
				count.Rules++
			}
		})
		if err != nil {
			return Count{}, err
		}
	}
	return count, nil
}

func countLegacy(ctx context.Context, cfg ChooseConfig, counts map[rules.Family]map[Backend]Count) error {
	for _, family := range cfg.Families {
		count, err := countLegacyFamily(ctx, family, cfg.Canary)
		if errors.Is(err, ErrNoFamily) || errors.Is(err, errNoLegacy) {
			continue
		}
		if err != nil {
			return err
		}
		counts[family][Legacy] = count
	}
	return nil
}

func countLegacyFamily(ctx context.Context, family rules.Family, canary string) (Count, error) {
	s, err := openXT(family)
	if err != nil {
		return Count{}, err
	}
	defer s.close()
	if err := s.check(); err != nil {
		return Count{}, err // errNoLegacy, which openXT puts up with
	}
	tables, err := s.tables()
	if err != nil {
		return Count{}, err
	}
	var count Count
	for _, table := range tables {
		if err := ctx.Err(); err != nil {
			return Count{}, err
		}
		err := s.entries(table, func(info xtInfo, data []byte) error {
			return count.walk(family, table, canary, info, data)
		})
		if err != nil {
			return Count{}, err
		}
	}
	return count, nil
}

// walk adds one legacy table to the count.
func (c *Count) walk(family rules.Family, table rules.TableName, canary string, info xtInfo, data []byte) error {
	own := false
	return walkEntries(family, info, data, xtVisitor{
		chain: func(name string) {
			own = isOwn(name, canary)
			c.Hint = c.Hint || isHint(Place{table, name})
		},
		rule: func(r xtRule) {
			if !own && !bytes.HasPrefix(r.comment, []byte(ownComment)) {
				c.Rules++
			}
		},
	})
}

func isHint(place Place) bool {
	return place.Table == rules.Mangle && slices.Contains(hintChains[:], place.Chain)
}

func isOwn(chain, canary string) bool { return canary != "" && chain == canary }
