package scenario

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Flusher changes a namespace's tables like firewall tools. An empty chain means all chains.
type Flusher interface {
	Backend() iptables.Backend
	// Flush is iptables -t TABLE -F [CHAIN].
	Flush(ctx context.Context, family rules.Family, table rules.TableName, chain string) error
	// DeleteChains is iptables -t TABLE -X.
	DeleteChains(ctx context.Context, family rules.Family, table rules.TableName) error
	// Restore is iptables-restore, RestoreNoflush iptables-restore --noflush.
	Restore(ctx context.Context, family rules.Family, text string) error
	RestoreNoflush(ctx context.Context, family rules.Family, text string) error
	// Save is iptables-save.
	Save(ctx context.Context, family rules.Family) (string, error)
	// DeleteTable, FlushTable and FlushRuleset are commands of nft.
	DeleteTable(ctx context.Context, family rules.Family, table rules.TableName) error
	FlushTable(ctx context.Context, family rules.Family, table rules.TableName) error
	FlushRuleset(ctx context.Context) error
}

// Lost has the verdict that a flush ought to get, by table. Other tables lose nothing.
type Lost map[rules.TableID]string

// The verdicts, as status and metrics spell them.
const (
	Emptied      = "emptied"
	ChainDeleted = "chain_deleted"
	TableDeleted = "table_deleted"
	Replaced     = "replaced"
	JumpsMissing = "jumps_missing"
)

// A Scenario is one way to lose rules. Its functions may share variables, so a Scenario is for
// one namespace at a time.
type Scenario struct {
	Name string
	// Command is the command that an administrator would type.
	Command  string
	Backends []iptables.Backend
	Lost     Lost
	// Prepare runs while canaryd watches, and only adds rules. Call Do when canaryd has
	// captured them. It may be nil.
	Prepare func(ctx context.Context, f Flusher) error
	Do      func(ctx context.Context, f Flusher) error
	// Times is how many times Do is called, each time after the repair; 0 means once.
	Times int
}

// On reports whether the scenario can happen on that backend.
func (s Scenario) On(b iptables.Backend) bool { return slices.Contains(s.Backends, b) }

var (
	bothBackends = []iptables.Backend{iptables.NFT, iptables.Legacy}
	bothFamilies = rules.Families()
)

// All returns all scenarios, new ones for each call.
func All() []Scenario {
	return append([]Scenario{
		{
			Name: "flush-all", Command: "iptables -F, every table", Backends: bothBackends,
			Lost: everywhere(Emptied, bothFamilies...),
			Do: func(ctx context.Context, f Flusher) error {
				return flush(ctx, f, false, bothFamilies, protect.Always()...)
			},
		},
		{
			Name: "flush-delete-all", Command: "iptables -F; iptables -X, every table", Backends: bothBackends,
			Lost: everywhere(ChainDeleted, bothFamilies...),
			Do: func(ctx context.Context, f Flusher) error {
				return flush(ctx, f, true, bothFamilies, protect.Always()...)
			},
		},
		{
			Name: "flush-nat", Command: "iptables -t nat -F", Backends: bothBackends,
			Lost: only(rules.IPv4, rules.Nat, Emptied),
			Do: func(ctx context.Context, f Flusher) error {
				return flush(ctx, f, false, []rules.Family{rules.IPv4}, rules.Nat)
			},
		},
		{
			Name: "flush-delete-nat", Command: "iptables -t nat -F; iptables -t nat -X", Backends: bothBackends,
			Lost: only(rules.IPv4, rules.Nat, ChainDeleted),
			Do: func(ctx context.Context, f Flusher) error {
				return flush(ctx, f, true, []rules.Family{rules.IPv4}, rules.Nat)
			},
		},
		{
			Name: "flush-forward", Command: "iptables -F FORWARD", Backends: bothBackends,
			Lost: only(rules.IPv4, rules.Filter, JumpsMissing),
			Do: func(ctx context.Context, f Flusher) error {
				return f.Flush(ctx, rules.IPv4, rules.Filter, "FORWARD")
			},
		},
		{
			Name: "flush-prerouting", Command: "iptables -t nat -F PREROUTING", Backends: bothBackends,
			Lost: only(rules.IPv4, rules.Nat, JumpsMissing),
			Do: func(ctx context.Context, f Flusher) error {
				return f.Flush(ctx, rules.IPv4, rules.Nat, "PREROUTING")
			},
		},
		{
			Name: "flush-postrouting", Command: "iptables -t nat -F POSTROUTING", Backends: bothBackends,
			Lost: only(rules.IPv4, rules.Nat, JumpsMissing),
			Do: func(ctx context.Context, f Flusher) error {
				return f.Flush(ctx, rules.IPv4, rules.Nat, "POSTROUTING")
			},
		},
		{
			Name: "restore-filter", Command: "iptables-restore < saved-filter-only.rules", Backends: bothBackends,
			Lost: only(rules.IPv4, rules.Filter, ChainDeleted),
			Do: func(ctx context.Context, f Flusher) error {
				return f.Restore(ctx, rules.IPv4, SavedFilter(rules.IPv4))
			},
		},
		restoreOld(),
		{
			Name: "flush-ipv6", Command: "ip6tables -F, every table", Backends: bothBackends,
			Lost: everywhere(Emptied, rules.IPv6),
			Do: func(ctx context.Context, f Flusher) error {
				return flush(ctx, f, false, []rules.Family{rules.IPv6}, protect.Always()...)
			},
		},
		{
			Name: "flush-ten-times", Command: "iptables -F, every table, 10 times", Backends: bothBackends, Times: 10,
			Lost: everywhere(Emptied, bothFamilies...),
			Do: func(ctx context.Context, f Flusher) error {
				return flush(ctx, f, false, bothFamilies, protect.Always()...)
			},
		},
	}, nftOnly()...)
}

// nftOnly returns the scenarios that need nft.
func nftOnly() []Scenario {
	backends := []iptables.Backend{iptables.NFT}
	return []Scenario{
		{
			Name: "nft-flush-ruleset", Command: "nft flush ruleset", Backends: backends,
			Lost: everywhere(TableDeleted, bothFamilies...),
			Do:   func(ctx context.Context, f Flusher) error { return f.FlushRuleset(ctx) },
		},
		{
			Name: "nft-delete-nat", Command: "nft delete table ip nat", Backends: backends,
			Lost: only(rules.IPv4, rules.Nat, TableDeleted),
			Do:   func(ctx context.Context, f Flusher) error { return f.DeleteTable(ctx, rules.IPv4, rules.Nat) },
		},
		{
			Name: "nft-flush-nat", Command: "nft flush table ip nat", Backends: backends,
			Lost: only(rules.IPv4, rules.Nat, Emptied),
			Do:   func(ctx context.Context, f Flusher) error { return f.FlushTable(ctx, rules.IPv4, rules.Nat) },
		},
	}
}

// restoreOld restores a file that was saved while canaryd watched. The file has canaryd's own
// canary, and lacks a service that was added later.
func restoreOld() Scenario {
	var saved string
	return Scenario{
		Name: "restore-old", Command: "iptables-restore < saved-before-a-change.rules", Backends: bothBackends,
		Lost: only(rules.IPv4, rules.Nat, Replaced),
		Prepare: func(ctx context.Context, f Flusher) error {
			var err error
			if saved, err = f.Save(ctx, rules.IPv4); err != nil {
				return err
			}
			return f.RestoreNoflush(ctx, rules.IPv4, NewService)
		},
		Do: func(ctx context.Context, f Flusher) error {
			if saved == "" {
				return errors.New("nothing was saved before the restore")
			}
			return f.Restore(ctx, rules.IPv4, saved)
		},
	}
}

// RestoreSaved restores a file that was saved before an owner wrote its rules, in all tables
// that existed then. The file has a rule in each of them that its administrator has deleted
// since. All does not include it: call Prepare before the owner writes, and before canaryd
// starts.
func RestoreSaved() Scenario {
	var saved string
	return Scenario{
		Name: "restore-saved", Command: "iptables-restore < saved-before-an-owner-came.rules", Backends: bothBackends,
		Prepare: func(ctx context.Context, f Flusher) error {
			var err error
			if err = f.RestoreNoflush(ctx, rules.IPv4, savedOnly("-A")); err == nil {
				saved, err = f.Save(ctx, rules.IPv4)
			}
			return errors.Join(err, f.RestoreNoflush(ctx, rules.IPv4, savedOnly("-D")))
		},
		Do: func(ctx context.Context, f Flusher) error {
			if saved == "" {
				return errors.New("nothing was saved before the restore")
			}
			return f.Restore(ctx, rules.IPv4, saved)
		},
	}
}

// savedOnly adds or deletes an administrator's rule in a built-in chain of each table.
func savedOnly(verb string) (text string) {
	for _, table := range protect.Always() {
		chains := rules.BuiltinChains(table)
		text += fmt.Sprintf("*%s\n%s %s -d 198.51.100.77/32 -m comment --comment \"%s\" -j ACCEPT\nCOMMIT\n", table, verb, chains[len(chains)-1], SavedOnly)
	}
	return text
}

// SavedOnly is the comment of rules that the file of RestoreSaved has, and the node does not
// have.
const SavedOnly = "in the saved file only"

// NewService is kube-proxy's text for a new service with one endpoint: chains of its own, and a
// rule in KUBE-SERVICES.
const NewService = `*nat
:KUBE-SVC-LATECOMER2345672 - [0:0]
:KUBE-SEP-LATECOMER2345673 - [0:0]
-A KUBE-SVC-LATECOMER2345672 -m comment --comment "demo/latecomer cluster IP" -m tcp -p tcp -d 10.96.77.1 --dport 80 ! -s 10.0.0.0/8 -j KUBE-MARK-MASQ
-A KUBE-SVC-LATECOMER2345672 -m comment --comment "demo/latecomer -> 10.1.7.7:8080" -j KUBE-SEP-LATECOMER2345673
-A KUBE-SEP-LATECOMER2345673 -m comment --comment "demo/latecomer" -s 10.1.7.7 -j KUBE-MARK-MASQ
-A KUBE-SEP-LATECOMER2345673 -m comment --comment "demo/latecomer" -m tcp -p tcp -j DNAT --to-destination 10.1.7.7:8080
-I KUBE-SERVICES -m comment --comment "demo/latecomer cluster IP" -m tcp -p tcp -d 10.96.77.1 --dport 80 -j KUBE-SVC-LATECOMER2345672
COMMIT
`

// Wipe makes each guarded table as empty as in a new namespace.
func Wipe(ctx context.Context, f Flusher, families ...rules.Family) error {
	var text string
	for _, table := range protect.Always() {
		text += "*" + string(table) + "\n"
		for _, chain := range rules.BuiltinChains(table) {
			text += ":" + chain + " ACCEPT [0:0]\n"
		}
		text += "COMMIT\n"
	}
	for _, family := range families {
		if err := f.Restore(ctx, family, text); err != nil {
			return err
		}
	}
	return nil
}

func flush(ctx context.Context, f Flusher, chainsToo bool, families []rules.Family, tables ...rules.TableName) error {
	for _, family := range families {
		for _, table := range tables {
			if err := f.Flush(ctx, family, table, ""); err != nil {
				return err
			}
			if !chainsToo {
				continue
			}
			// While canaryd watches, the chains may already have rules again, and -X refuses
			// them. The flush has succeeded anyway.
			_ = f.DeleteChains(ctx, family, table)
		}
	}
	return nil
}

func everywhere(verdict string, families ...rules.Family) Lost {
	lost := Lost{}
	for _, family := range families {
		for _, table := range protect.Always() {
			lost[family.Table(table)] = verdict
		}
	}
	return lost
}

func only(family rules.Family, table rules.TableName, verdict string) Lost {
	return Lost{family.Table(table): verdict}
}
