package native

import (
	"errors"
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Kernel is nf_tables of this network namespace, for a guard of native tables: it hears of
// commits, reads and writes. A LateKernel opens it. It is for one goroutine.
type Kernel struct {
	conn   *nft.Conn
	events *nft.Events
	port   uint32
	hearing
	afterCapture func() // what a test does between a read and hearing what came behind it
}

// Close ends it.
func (k *Kernel) Close() error { return errors.Join(k.events.Close(), k.conn.Close()) }

// Genid returns the ruleset's counter.
func (k *Kernel) Genid() (uint32, error) { return k.conn.Genid() }

// Witness is Witness of the package.
func (k *Kernel) Witness(family tableid.Family) (string, error) { return Witness(k.conn, family) }

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
	conn, _, err := nft.DialIfAny()
	if conn == nil {
		return err
	}
	defer func() { _ = conn.Close() }() // it was read from only
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
