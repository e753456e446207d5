package flushes

import (
	"iter"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// EndAbsence notes in the record that everything was back at that time. It returns how long it
// was missing, for the metrics. If the exact time of the loss is not known, that is a bound. It is
// one, too, if the rules' owner put them back (Skipped), because no read shows the moment.
func EndAbsence(r *api.Flush, at time.Time) time.Duration {
	since := pace.Earliest(r.Time, r.LastInForce)
	r.AbsentAtMost = !r.LastInForce.IsZero() || r.Outcome == reload.Skipped
	absent := at.Sub(since)
	r.AbsentSeconds = absent.Seconds()
	return absent
}

// JumpsIn returns the rules of the jumps in a chain.
func JumpsIn(jumps []rules.Jump, chain string) []rules.Rule {
	var list []rules.Rule
	for _, h := range jumps {
		if h.Chain == chain {
			list = append(list, h.Rule)
		}
	}
	return list
}

// Recorded returns the tables of a record with their verdicts, when a run continues a record of
// the last run.
func Recorded(r api.Flush) Verdicts {
	tables := Verdicts{}
	for _, t := range r.Lost.Tables {
		tables[t.Family.Table(t.Table)] = t.Kind
	}
	return tables
}

// PodTexts returns the pods of a record in the log's words.
func PodTexts(r api.Flush) []string {
	var list []string
	for _, p := range r.Pods[:min(len(r.Pods), NamesKept)] {
		list = append(list, p.String())
	}
	return list
}

// A Hit is the loss of one table.
type Hit struct {
	Verdict  canary.Verdict
	Lost     reload.Lost
	Policies []string
	Finding  canary.Finding
	Seen     uint64       // the digest of the read that showed it
	Table    *rules.Table // as that read showed it
	By       []watch.Writer
	Others   int  // unprotected rules that were lost with them
	Unsure   bool // Others is incomplete
}

// HitOf returns a table's loss as a read without a replay showed it.
func HitOf(x reload.Examined) Hit {
	return Hit{Verdict: x.Finding.Verdict, Lost: x.Lost, Finding: x.Finding, Seen: x.Seen, Table: x.Table}
}

// TookMarks reports whether marks are gone, which means that a built-in chain or the whole
// table was flushed.
func (h Hit) TookMarks() bool { return h.Finding.MarkLost || len(h.Finding.Witnesses) > 0 }

// Verdicts are the verdicts on some tables.
type Verdicts map[rules.TableID]canary.Verdict

// Public returns the verdicts in the form of a Status and of metrics, by family and table.
func (v Verdicts) Public() map[rules.Family]api.Verdicts {
	all := map[rules.Family]api.Verdicts{}
	for id, verdict := range v {
		if all[id.Family] == nil {
			all[id.Family] = api.Verdicts{}
		}
		all[id.Family][id.Name] = verdict
	}
	return all
}

// Text names the tables for the log.
func (v Verdicts) Text() string { return api.TablesText(v.Public()) }

// gravity orders the kinds of loss; a record gets the gravest.
var gravity = []canary.Verdict{
	canary.Drifted, canary.JumpsMissing, canary.Verdict(native.Disabled), canary.Emptied, canary.Verdict(native.Unattributed),
	canary.Replaced, canary.ChainDeleted, canary.TableDeleted,
}

// Graver reports whether a kind of loss is graver than another one.
func Graver(a, b canary.Verdict) bool { return slices.Index(gravity, a) > slices.Index(gravity, b) }

// BackOnRequest is the log's sentence about rules that were missing until an operator asked for
// them.
const BackOnRequest = "The rules are back: they were restored on request"

// LogBack logs the end of a loss of rules in these tables, in the words of the record's
// outcome. asked: an operator requested a restore. attempts counts the replays that it took.
func LogBack(log klog.Logger, tables string, r api.Flush, asked bool, attempts int) {
	what := "The rules are back and proved"
	log = severity.Notices(log)
	switch {
	case r.Outcome == api.Drilled:
		what = "The drill's canary is back and proved"
	case r.Outcome == reload.Partial:
		log = severity.Errors(log)
		what = "The rules are back, but some had to be left out, or are not proved"
	case r.Outcome == reload.Skipped:
		what = "The rules are back: their owner wrote them"
	case asked:
		what = BackOnRequest
	}
	values := []any{"flush", r.ID, "tables", tables, "outcome", r.Outcome}
	if r.AbsentSeconds > 0 { // else its begin is not known
		values = append(values, AbsentKey(r), api.Seconds(r.AbsentSeconds).Round(10*time.Microsecond))
	}
	log.Info(what, append(values, "attempts", attempts)...)
}

// AbsentKey is the log's key for the duration of an absence; another key says that it is only a
// bound.
func AbsentKey(r api.Flush) string {
	if r.AbsentAtMost {
		return "absentAtMost"
	}
	return "absent"
}

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

// TablesOf yields the result of a replay for each table, in their order.
func TablesOf(result reload.Result) iter.Seq2[rules.TableID, reload.TableResult] {
	return func(yield func(rules.TableID, reload.TableResult) bool) {
		for _, id := range TableIDs() {
			if tr, ok := result[id.Family].Tables[id.Name]; ok && !yield(id, tr) {
				return
			}
		}
	}
}
