package api

import (
	"fmt"
	"iter"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// InOrder walks a map by family, IPv4 first.
func InOrder[V any](families map[rules.Family]V) iter.Seq2[rules.Family, V] {
	return func(yield func(rules.Family, V) bool) {
		for _, f := range rules.Families() {
			if v, ok := families[f]; ok && !yield(f, v) {
				return
			}
		}
	}
}

// Tables walks the verdicts on the guarded tables of all families in the map. A table without a
// verdict gets "". A table that is guarded on demand, and in which nothing is protected now, is
// left out.
func Tables(families map[rules.Family]Verdicts) iter.Seq2[rules.TableID, canary.Verdict] {
	return func(yield func(rules.TableID, canary.Verdict) bool) {
		for f, verdicts := range InOrder(families) {
			for _, t := range protect.Tables() {
				if v, known := verdicts[t]; (known || !protect.OnDemand(t)) && !yield(f.Table(t), v) {
					return
				}
			}
		}
	}
}

// Words returns each item of a list as a word.
func Words[T any](list []T) []string {
	words := make([]string, len(list))
	for i, item := range list {
		words[i] = fmt.Sprint(item)
	}
	return words
}
