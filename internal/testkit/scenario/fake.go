package scenario

import (
	"context"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// FakePrograms is a Flusher that writes to a Fake.
type FakePrograms struct {
	Fake *iptablestest.Fake
}

var _ Flusher = FakePrograms{}

// Backend returns the backend that the Fake simulates.
func (p FakePrograms) Backend() iptables.Backend { return p.Fake.Info().Backend }

// Flush does iptables -F.
func (p FakePrograms) Flush(_ context.Context, family rules.Family, table rules.TableName, chain string) error {
	return p.Fake.Flush(family, table, chain)
}

// DeleteChains does iptables -X.
func (p FakePrograms) DeleteChains(_ context.Context, family rules.Family, table rules.TableName) error {
	return p.Fake.DeleteChains(family, table)
}

// Restore does iptables-restore.
func (p FakePrograms) Restore(_ context.Context, family rules.Family, text string) error {
	return p.Fake.Restore(family, text)
}

// RestoreNoflush does iptables-restore --noflush.
func (p FakePrograms) RestoreNoflush(_ context.Context, family rules.Family, text string) error {
	return p.Fake.RestoreNoflush(family, text)
}

// Save does iptables-save.
func (p FakePrograms) Save(_ context.Context, family rules.Family) (string, error) {
	return p.Fake.Save(family), nil
}

// DeleteTable does nft delete table.
func (p FakePrograms) DeleteTable(_ context.Context, family rules.Family, table rules.TableName) error {
	return p.Fake.DeleteTable(family, table)
}

// FlushTable does nft flush table.
func (p FakePrograms) FlushTable(_ context.Context, family rules.Family, table rules.TableName) error {
	return p.Fake.FlushTable(family, table)
}

// FlushRuleset does nft flush ruleset.
func (p FakePrograms) FlushRuleset(context.Context) error { return p.Fake.FlushRuleset() }
