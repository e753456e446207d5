package daemon

import (
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// tableState is what the loop knows of one table.
type tableState struct {
	verdict canary.Verdict
	seen    rules.Section // of the last read
	known   bool          // whether seen holds anything
	pending bool          // the generation does not hold yet what was seen
	trouble trouble       // why the table could not be read
	// learningStopped: a loss was seen in observe mode and lasts until the owner has
	// put its rules back; nothing is learned meanwhile.
	learningStopped bool
	// spared: it does not exist and nothing is protected in it, so that it has no marks.
	spared bool
	placed []placed // jumps that were put back, those of the last grace
	// standing is what the last read showed of it while nothing was lost.
	standing standing
}

// newTables returns the tables of a family of which nothing is known yet.
func newTables() map[rules.TableName]*tableState {
	tables := map[rules.TableName]*tableState{}
	for _, t := range protect.Tables() {
		tables[t] = &tableState{verdict: canary.Unknown}
	}
	return tables
}

// known is when a family's content was known.
type known struct {
	at        time.Time // when it was last known what the tables hold; zero: never
	natIntact time.Time // when it was last known that nat held the whole generation; zero: never
}
