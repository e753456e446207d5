package owners

import (
	"sync"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// oneFlush is the count of one flush of all tables of both families.
var oneFlush = counts{Proved: 2, Tables: 6, Records: 1}

// flushStories are about real flushes, which canaryd must not answer twice.
func flushStories() []story {
	return []story{
		{
			// A flush consists of several commands, on a busy machine far apart:
			// --settle combines them into one.
			name: "canaryd's own restore is no second flush", flags: []string{"--settle=2s"},
			prepare: loadOnly, happens: ownRestore, quiet: testkit.Size(5*time.Second, 10*time.Second), want: oneFlush,
		},
		{
			name:    "canaryd is suspended and all is flushed meanwhile",
			prepare: loadOnly, happens: suspendBesideFlush, want: oneFlush,
		},
	}
}

// wipe empties all tables of both families, with a single restore for each.
func wipe(n *nodetest.Node) {
	n.Helper()
	var all sync.WaitGroup
	for _, family := range rules.Families() {
		all.Go(func() {
			if err := scenario.Wipe(n.Context(), n.Programs, family); err != nil {
				n.Error(err)
			}
		})
	}
	all.Wait()
}

func ownRestore(n *nodetest.Node, _ *nodetest.Process) {
	before := n.Protected()
	wipe(n)
	n.Healed(1)
	n.Same("protected rules", before, n.Protected())
}

func suspendBesideFlush(n *nodetest.Node, d *nodetest.Process) {
	before := n.Protected()
	d.Suspend()
	testkit.Pass(n.T, suspended/2, "how long canaryd is suspended before the flush")
	n.Flush()
	testkit.Pass(n.T, suspended/2, "how long canaryd is suspended after the flush")
	d.Signal(syscall.SIGCONT)
	n.Healed(1)
	n.Same("protected rules", before, n.Protected())
}
