package flushes

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// These constants bound the memory for records. A flush of 5,000 services removes 16,000
// chains, and flushes may never end.
const (
	Kept          = api.KeptFlushes
	NamesKept     = 20  // names in one line of the log
	chainsListed  = 200 // chains with their counts in one record,
	tableListed   = 100 // in one of its tables,
	recordsListed = 20  // in so many records; older ones have only counts
)

// AddLoss adds one table's loss to the record: to the sums, the list of tables and the
// culprits. The gravest verdict becomes the record's kind.
func AddLoss(r *api.Flush, id rules.TableID, h Hit) {
	f, t := id.Family, id.Name
	if !slices.Contains(r.Families, f) {
		r.Families = append(r.Families, f)
	}
	if !slices.Contains(r.Tables, t) {
		r.Tables = append(r.Tables, t)
	}
	if Graver(h.Verdict, r.Kind) {
		r.Kind = h.Verdict
	}
	r.Lost.Chains += len(h.Lost.Chains)
	r.Lost.Rules += h.Lost.Rules
	r.Lost.Jumps += len(h.Lost.Jumps)
	r.Lost.Unprotected += h.Others
	r.Lost.UnprotectedUnknown = r.Lost.UnprotectedUnknown || h.Unsure
	table := api.TableLoss{
		Family: f, Table: t, Kind: h.Verdict,
		Chains: len(h.Lost.Chains), Rules: h.Lost.Rules, Jumps: len(h.Lost.Jumps), Unprotected: h.Others, UnprotectedUnknown: h.Unsure, By: Accuse(r, h.By), PerChain: perChain(t, h.Lost),
	}
	listed := 0
	for _, other := range r.Lost.Tables {
		listed += len(other.PerChain)
	}
	listChains(&table, min(tableListed, chainsListed-listed))
	r.Lost.Tables = append(r.Lost.Tables, table)
	r.Policies = append(r.Policies, h.Policies...)
}

// AddNativeLoss adds one native table's loss to the record: to the sums and the list of tables. The
// gravest verdict becomes the record's kind.
func AddNativeLoss(r *api.Flush, loss api.NativeLoss) {
	r.Native = append(r.Native, loss)
	r.Lost.Chains += loss.Chains
	r.Lost.Rules += loss.Rules
	r.Lost.Elements += loss.Elements
	if Graver(loss.Kind, r.Kind) {
		r.Kind = loss.Kind
	}
}

// AddMore adds rules that a purge removed from a table after a first replay, which already has
// a row in the record. The record stays one flush.
func AddMore(r *api.Flush, id rules.TableID, h Hit) {
	i := slices.IndexFunc(r.Lost.Tables, func(t api.TableLoss) bool { return t.Family == id.Family && t.Table == id.Name })
	if i < 0 {
		return
	}
	t := &r.Lost.Tables[i]
	r.Lost.Chains, t.Chains = r.Lost.Chains+len(h.Lost.Chains), t.Chains+len(h.Lost.Chains)
	r.Lost.Rules, t.Rules = r.Lost.Rules+h.Lost.Rules, t.Rules+h.Lost.Rules
	r.Lost.Jumps, t.Jumps = r.Lost.Jumps+len(h.Lost.Jumps), t.Jumps+len(h.Lost.Jumps)
	for _, c := range perChain(id.Name, h.Lost) {
		if k := slices.IndexFunc(t.PerChain, func(o api.ChainLoss) bool { return o.Chain == c.Chain }); k >= 0 {
			t.PerChain[k].Rules, t.PerChain[k].Jumps = t.PerChain[k].Rules+c.Rules, t.PerChain[k].Jumps+c.Jumps
			continue
		}
		t.PerChain = append(t.PerChain, c)
	}
	listChains(t, tableListed)
}

// perChain counts the losses of each chain, the largest first.
func perChain(t rules.TableName, lost reload.Lost) []api.ChainLoss {
	var list []api.ChainLoss
	for _, chain := range rules.BuiltinChains(t) {
		if jumps := len(JumpsIn(lost.Jumps, chain)); jumps > 0 {
			list = append(list, api.ChainLoss{Chain: chain, Rules: jumps, Jumps: jumps})
		}
	}
	for _, c := range lost.Chains {
		gone, _ := c.Apart()
		list = append(list, api.ChainLoss{Chain: c.Name, Rules: len(gone)})
	}
	sorting.Stable(list, func(a, b api.ChainLoss) int { return b.Rules - a.Rules })
	return list
}

// listChains keeps the first n chains, and counts the others in More. It copies their names,
// because these share memory with the text of the whole ruleset.
func listChains(l *api.TableLoss, n int) {
	l.More += max(len(l.PerChain)-n, 0)
	l.PerChain = slices.Clone(l.PerChain[:min(len(l.PerChain), n)])
	for i := range l.PerChain {
		l.PerChain[i].Chain = strings.Clone(l.PerChain[i].Chain)
	}
}

// dropLists keeps only the tables' counts of a record. Copies of the record keep their lists.
func dropLists(r *api.Flush) {
	r.Lost.Tables = slices.Clone(r.Lost.Tables)
	for i := range r.Lost.Tables {
		listChains(&r.Lost.Tables[i], 0)
	}
}
