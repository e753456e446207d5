package faults

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// TestDiskFails: the state folder is full, then read-only. canaryd keeps replaying, the log
// names the consequences, and the generation is on disk once there is room again.
func TestDiskFails(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		n.Must(os.MkdirAll("/run/state", 0o700))
		n.Must(unix.Mount("tmpfs", "/run/state", "tmpfs", 0, "size=1m,mode=0700"))
		d := start(n)
		protected := n.Protected()
		const litter = "/run/state/litter"
		fill := func() {
			file, err := os.Create(litter)
			n.Must(err)
			defer file.Close()
			for err == nil {
				_, err = file.Write(make([]byte, 4096))
			}
		}
		healed := func(why string, records int) {
			n.Helper()
			d.flushAtOnce(nil)
			n.Healed(records)
			n.Same("protected rules with a disk that is "+why, protected, n.Protected())
		}
		fill()
		healed("full", 1)
		n.Until("the log", func() error {
			if !strings.Contains(d.daemon.Log(), "The generation is not on disk") || !strings.Contains(d.daemon.Log(), "A flush record is not on disk") {
				return fmt.Errorf("it does not say that nothing is kept")
			}
			return nil
		})
		n.Must(os.Remove(litter))
		n.Must(unix.Mount("", "/run/state", "", unix.MS_REMOUNT|unix.MS_RDONLY, "size=1m,mode=0700"))
		healed("read-only", 2)
		n.Must(unix.Mount("", "/run/state", "", unix.MS_REMOUNT, "size=1m,mode=0700"))
		healed("there again", 3)
		d.daemon.Stop()
		next := n.Start()
		next.WantLog("Took up the stored generation")
		if got := n.Status().Flushes; len(got) != 0 {
			n.Errorf("after the disk came back and a restart: %+v", got)
		}
		// The journal tries again by itself, and at the next flush.
		kept := n.WholeStatus().Flushes
		if len(kept) < 3 {
			n.Errorf("%d flush records are on disk, want those of 3 flushes: %+v", len(kept), kept)
		}
		for _, record := range kept {
			if told, _ := n.Want(0, "status", "--flush", record.ID); !strings.Contains(told, "\n--A ") {
				n.Errorf("the journal does not say what flush %s took:\n%s", record.ID, told)
			}
		}
		n.Same("protected rules in the end", protected, n.Protected())
		next.Stop()
	})
}

// TestDiskIsReadOnlyAtStart: /var is mounted read-only, with or without the state of an earlier
// run. canaryd starts, guards, restores the rules that were flushed while it was down, and says
// that it stores nothing. It stores them once the disk takes them.
func TestDiskIsReadOnlyAtStart(t *testing.T) {
	for name, earlier := range map[string]bool{"with an earlier state": true, "with nothing on it": false} {
		t.Run(name, func(t *testing.T) {
			nodetest.OnBoth(t, func(n *nodetest.Node) {
				n.Load()
				n.Must(os.MkdirAll("/run/state", 0o700))
				n.Must(unix.Mount("tmpfs", "/run/state", "tmpfs", 0, "size=4m,mode=0700"))
				if earlier {
					n.Start().Stop()
				}
				protected := n.Protected()
				n.Must(unix.Mount("", "/run/state", "", unix.MS_REMOUNT|unix.MS_RDONLY, "size=4m,mode=0700"))
				if earlier {
					n.Flush()
				}
				next := n.Start()
				next.WantLog("The generation is not on disk")
				n.Same("protected rules after the start", protected, n.Protected())
				says := func(want bool) error {
					if _, told, _ := n.Canaryd("status"); strings.Contains(told, "the latest rules are NOT on disk") != want || strings.HasPrefix(told, "healthy, but") != want {
						return fmt.Errorf("status says of the disk:\n%s", told)
					}
					return nil
				}
				n.Must(says(true))
				n.Flush()
				n.Until("the rules", func() error {
					if !slices.Equal(protected, n.Protected()) {
						return errors.New("they are not back")
					}
					return nil
				})
				n.Must(unix.Mount("", "/run/state", "", unix.MS_REMOUNT, "size=4m,mode=0700"))
				n.Until("the disk", func() error { return says(false) })
				next.Stop()
				n.Start().WantLog("Took up the stored generation")
			})
		})
	}
}

// TestDiskIsFullAtStart: a state folder of 8 KiB is full. canaryd starts and heals without it,
// and the log names the consequences.
func TestDiskIsFullAtStart(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		n.Must(os.MkdirAll("/run/state", 0o700))
		n.Must(unix.Mount("tmpfs", "/run/state", "tmpfs", 0, "size=8k,mode=0700"))
		n.Must(os.WriteFile("/run/state/litter", make([]byte, 8<<10), 0o600))
		d := start(n)
		d.during(fault{name: "full", begin: func() func() { return func() {} }, heals: true})
		d.daemon.WantLog("not on disk")
		d.daemon.Stop()
	})
}
