package watch_test

import (
	"context"
	"fmt"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// Watch commits: a hint says when to look, and Writers names the processes.
func ExampleCommitWatcher() {
	ctx, cancel := context.WithCancel(context.Background())
	kernel := iptablestest.NewFake(iptables.NFT, rules.IPv4)
	source := kernel.Subscribe() // of a real kernel: (*iptables.Kernel).Subscribe
	watcher := watch.CommitWatcher{
		Subscribe: func() (watch.CommitSource, error) { return source, nil },
		Hints:     watch.NewHints(),
		Writers:   &watch.Writers{},
	}
	ended := make(chan error)
	go func() { ended <- watcher.Run(ctx) }()

	before, err := kernel.Stamp(ctx, rules.IPv4)
	if err != nil {
		panic(err)
	}
	genid := uint32(before.Value)
	if err := kernel.As(4711, "firewalld").RestoreNoflush(rules.IPv4, "*nat\n:THEIRS - [0:0]\nCOMMIT\n"); err != nil {
		panic(err)
	}
	var writers []watch.Writer
	for len(writers) == 0 {
		<-watcher.Hints.C() // only a reason to look: the beginning is one too
		writers = watcher.Writers.Between(genid, genid+1)
	}
	for _, w := range writers {
		fmt.Println(w.Comm, "wrote; it was this process:", w.Own)
	}

	cancel()
	fmt.Println(<-ended)
	// Output:
	// firewalld wrote; it was this process: false
	// <nil>
}
