package native

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// hearMost bounds the wait for notifications of a commit that the genid shows already.
	hearMost = time.Second
	// tornMost is hearMost after an overflow: what ends the commit was dropped most likely.
	tornMost = 20 * time.Millisecond
)

// A Kernel is nf_tables of this network namespace, for a guard of native tables: it hears of
// commits, reads and writes. A LateKernel opens it. It is for one goroutine.
type Kernel struct {
	conn   *nft.Conn
	events *nft.Events
	port   uint32
	rec    Recorder
	// torn: the notifications of a commit came in part, so that what ends it says nothing.
	torn bool
}

// Close ends it.
func (k *Kernel) Close() error { return errors.Join(k.events.Close(), k.conn.Close()) }

// Genid returns the ruleset's counter.
func (k *Kernel) Genid() (uint32, error) { return k.conn.Genid() }

// Capture is Capture of the package.
func (k *Kernel) Capture(wanted func(nft.Table) bool) (*Ruleset, error) {
	return Capture(k.conn, wanted)
}

// Witness is Witness of the package.
func (k *Kernel) Witness(family tableid.Family) (string, error) { return Witness(k.conn, family) }

// A Commit is what one transaction did.
type Commit struct {
	nft.Commit
	Deeds map[tableid.TableID]*Deed
	// WitnessLost has the families whose witness went.
	WitnessLost map[tableid.Family]bool
}

// Hear returns the commits since it was called before, up to genid at least, the oldest first.
// With missed there were others, of which not all was heard.
func (k *Kernel) Hear(genid uint32) (commits []Commit, missed bool, err error) {
	last := k.events.UpTo()
	take := func(n nft.Notification) error {
		if n.Kind != unix.NFT_MSG_NEWGEN {
			return k.rec.Take(n.Kind, n.Family, n.Attrs)
		}
		witness := maps.Clone(k.rec.witness)
		deeds := k.rec.End(n.By)
		missed = missed || k.torn || n.By.Genid != nft.Following(last)
		whole := !k.torn && nft.Newer(n.By.Genid, last)
		if last, k.torn = n.By.Genid, false; whole {
			commits = append(commits, Commit{n.By, deeds, witness})
		}
		return nil
	}
	for deadline := time.Now().Add(hearMost); ; {
		err := k.events.DrainAll(take)
		if err != nil { // what came was taken; the rest of that commit is of no use
			k.rec, k.torn, missed = Recorder{}, true, true
			if soon := time.Now().Add(tornMost); soon.Before(deadline) {
				deadline = soon
			}
		}
		var errno syscall.Errno
		switch {
		case errors.As(err, &errno) && errno != syscall.ENOBUFS:
			return commits, true, fmt.Errorf("hearing of commits: %w", err)
		case err == nil && !nft.Newer(genid, k.events.UpTo()):
			return commits, missed, nil
		case time.Now().After(deadline):
			k.events.SkipTo(genid)
			// A commit is visible before it is heard of: if there is none, what comes next is
			// whole.
			if now, err := k.conn.Genid(); err == nil && now == genid {
				k.rec, k.torn = Recorder{}, false
			}
			return commits, true, nil
		case err == nil:
			time.Sleep(time.Millisecond)
		}
	}
}

// Write writes repairs, and plants witnesses by their nonces, in one transaction that the kernel
// takes at that genid only. It returns the network devices that the node lacks and that were left
// out. The error is nft.ErrStale if another process wrote, or a *nft.RefusedError.
func (k *Kernel) Write(genid uint32, repairs []Repair, witnesses map[tableid.Family]string) (left []string, err error) {
	b := nft.NewBatch()
	b.Port = k.port
	b.Guard(genid)
	if left, err = k.Append(b, repairs, witnesses); err != nil {
		return nil, err
	}
	b.Finish()
	return left, b.Send()
}

// Append is Write into a batch of the caller's, which guards and sends it.
func (*Kernel) Append(b *nft.Batch, repairs []Repair, witnesses map[tableid.Family]string) (left []string, err error) {
	for _, family := range slices.Sorted(maps.Keys(witnesses)) {
		if err := PlantWitness(b, family, witnesses[family]); err != nil {
			return nil, err
		}
	}
	for _, r := range repairs {
		lacking, err := r.write(b)
		if err != nil {
			return nil, err
		}
		left = append(left, lacking...)
	}
	return left, nil
}

// RemoveWitnesses deletes the witnesses of all families.
func RemoveWitnesses(port uint32) error {
	conn, err := nft.Dial()
	if errors.Is(err, nft.ErrNone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // it was read from only
	if _, err := conn.Genid(); errors.Is(err, nft.ErrNone) {
		return nil
	}
	b, found := nft.NewBatch(), false
	b.Port = port
	err = conn.EachTable(func(t nft.Table) error {
		if t.Name == WitnessName {
			found = true
			Delete(b, t.Family.Table(t.Name))
		}
		return nil
	})
	if err != nil || !found {
		return err
	}
	b.Finish()
	return b.Send()
}

// Counts returns how many chains, rules and elements of named sets the table has.
func (t *Table) Counts() (chains, rules, elements int) {
	for i := range t.Chains {
		if !t.Chains[i].Bound {
			chains++
		}
		rules += len(t.Chains[i].Rules)
	}
	for i := range t.Sets {
		if !t.Sets[i].Anonymous() {
			elements += len(t.Sets[i].Elements)
		}
	}
	return chains, rules, elements
}
