package iptables

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
)

// opaque returns a rule without a text, for spell. It has its bytes if these can
// make the rule again; otherwise a digest identifies it, and the reason names the obstacle.
func opaque(family rules.Family, r nft.Rule) rules.Rule {
	bare, names, named := withoutNames(r)
	meaning, err := meaningOf(r)
	target, reason := targetOf(r), rules.Decoded(ruleset.Label(family, bare.Expressions, names), meaning.target || err != nil)
	switch _, err := needsOf(r, family); {
	case err != nil:
		return identityOf(r).OpaqueRule(target, err.Error())
	case named:
		return rules.OpaqueSets(bare.Expressions, bare.Userdata, names, target, reason)
	}
	return rules.OpaqueBytes(r.Expressions, r.Userdata, target, reason)
}

// Reread returns an opaque rule as this version reads its bytes, if it has any.
// A stored generation passes it: an earlier version may have had no words for them.
func Reread(family rules.Family, rule rules.Rule) rules.Rule {
	raw, held := heldBytes(rule)
	if held && raw.Each(func(nft.Expression) error { return nil }) != nil {
		raw, held = olderEntry(family, raw.Expressions, string(raw.Userdata))
	}
	if !held {
		return rule
	}
	now, _ := spell(family, raw)
	return now
}

// statementTargets are the targets of iptables that do the same as expressions of nf_tables.
var statementTargets = map[string]string{
	"masq": "MASQUERADE", "redir": "REDIRECT", "reject": "REJECT", "log": "LOG", "notrack": "NOTRACK", "tproxy": "TPROXY", "queue": "NFQUEUE", "dup": "TEE",
}

// metaTargets are the targets that set a packet's metadata.
var metaTargets = map[uint32]string{unix.NFT_META_MARK: "MARK", unix.NFT_META_NFTRACE: "TRACE"}

// targetOf returns the chain that a rule leads to or the target at its end, in iptables' words.
// It is "" without one, or for an unknown one. An opaque rule has it as Target; meet compares
// it with a stored text's.
func targetOf(r nft.Rule) string {
	target := ""
	err := r.Each(func(e nft.Expression) error {
		switch e.Name {
		case "immediate":
			if to := verdictOf(e.Data); to != "" {
				target = to
			}
		case "target":
			target = extensionName(e)
		case "meta":
			if to := metaTargets[nft.AttrNumber(e.Data, unix.NFTA_META_KEY)]; to != "" && nft.AttrPath(e.Data, unix.NFTA_META_SREG) != nil {
				target = to
			}
		case "nat":
			target = map[uint32]string{unix.NFT_NAT_SNAT: "SNAT", unix.NFT_NAT_DNAT: "DNAT"}[nft.AttrNumber(e.Data, unix.NFTA_NAT_TYPE)]
		default:
			if to, known := statementTargets[e.Name]; known {
				target = to
			}
		}
		return nil
	})
	if err != nil {
		return ""
	}
	return target
}

// verdictOf returns the verdict of an "immediate" expression, for targetOf: a chain's name or a
// verdict's, "" for anything else.
func verdictOf(data []byte) string {
	verdict := nft.AttrPath(data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT)
	if chain := nft.AttrPath(verdict, unix.NFTA_VERDICT_CHAIN); chain != nil {
		return nft.String(chain)
	}
	switch int32(nft.AttrNumber(verdict, unix.NFTA_VERDICT_CODE)) {
	case 0: // NF_DROP
		return "DROP"
	case nfAccept:
		return "ACCEPT"
	case unix.NFT_RETURN:
		return "RETURN"
	}
	return ""
}
