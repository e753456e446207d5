package flushes

import (
	"iter"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TableIDs returns the tables of iptables that canaryd guards, in their order. The list is shared:
// each step walks it several times.
func TableIDs() []rules.TableID { return guardedTables }

var guardedTables = func() (ids []rules.TableID) {
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			ids = append(ids, f.Table(t))
		}
	}
	return ids
}()

// TablesOf yields what a replay came to for each table, in their order.
func TablesOf(result reload.Result) iter.Seq2[rules.TableID, reload.TableResult] {
	return func(yield func(rules.TableID, reload.TableResult) bool) {
		for _, id := range TableIDs() {
			if tr, ok := result[id.Family].Tables[id.Name]; ok && !yield(id, tr) {
				return
			}
		}
	}
}
