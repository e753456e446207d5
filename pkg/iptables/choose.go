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

// A Count is what one backend holds for one family.
type Count struct {
	Rules int  `json:"rules"`
	Hint  bool `json:"hint"` // one of kubelet's hint chains is there
}

// Evidence is what Choose found, and what follows from it.
type Evidence struct {
	Backend Backend `json:"backend"`
	// Reason is half a sentence for people, without a full stop.
	Reason string `json:"reason"`
	// Mixed: both backends hold rules of somebody's.
	Mixed bool `json:"mixed"`
	// Counts has an entry for every family and backend that was asked.
	Counts map[rules.Family]map[Backend]Count `json:"counts"`
}

// Choose decides which backend is in use on this machine: one decision for
// both families. It executes nothing and creates nothing. A single hint wins;
// with hints on both sides or none the backend with more rules wins; a tie is
// nft. What cannot be read is an error, never "no evidence": ask again later.
func Choose(ctx context.Context, cfg ChooseConfig) (Evidence, error) {
	if cfg.Families == nil {
		cfg.Families = rules.Families()
	}
	evidence := Evidence{Counts: map[rules.Family]map[Backend]Count{}}
	for _, family := range cfg.Families {
		evidence.Counts[family] = map[Backend]Count{}
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

// decide is the pure part of Choose.
func (e *Evidence) decide(hasNFT bool) {
	nft, legacy := e.sum(NFT), e.sum(Legacy)
	e.Mixed = nft.Rules > 0 && legacy.Rules > 0
	e.Backend = NFT
	switch {
	case nft.Hint != legacy.Hint:
		if legacy.Hint {
			e.Backend = Legacy
		}
		e.Reason = fmt.Sprintf("kubelet's hint chain is in %s only", e.Backend)
	case nft.Rules != legacy.Rules:
		if legacy.Rules > nft.Rules {
			e.Backend = Legacy
		}
		e.Reason = fmt.Sprintf("%s holds more rules: nft %d, legacy %d", e.Backend, nft.Rules, legacy.Rules)
	case !hasNFT:
		e.Backend = Legacy
		e.Reason = "the kernel has no nf_tables"
	case nft.Rules == 0:
		e.Reason = "neither backend holds rules, and nft is the default"
	default:
		e.Reason = fmt.Sprintf("both backends hold %d rules, and nft is the default", nft.Rules)
	}
}

func (e *Evidence) sum(backend Backend) Count {
	var total Count
	for _, counts := range e.Counts {
		total.Rules += counts[backend].Rules
		total.Hint = total.Hint || counts[backend].Hint
	}
	return total
}

// Empty reports that nobody's rules or hints were found: whoever comes first
// may still decide the backend.
func (e *Evidence) Empty() bool {
	nft, legacy := e.sum(NFT), e.sum(Legacy)
	return nft == Count{} && legacy == Count{}
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
