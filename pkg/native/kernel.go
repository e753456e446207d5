package native

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Kernel is nf_tables of this network namespace, for a guard of native tables: it hears of
// commits, reads and writes. It is for one goroutine.
type Kernel struct {
	conn   *nft.Conn
	events *nft.Events
	port   uint32
	hearing
}

// OpenKernel opens it, and hears of each commit from now on. Transactions are sent from the
// netlink address port; own says of a commit's address and process whether it is canaryd's own.
func OpenKernel(port uint32, own func(port, pid uint32) bool) (*Kernel, error) {
	conn, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	events, err := nft.OpenEvents(conn.Genid, own)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Kernel{conn: conn, events: events, port: port, hearing: hearing{upTo: events.UpTo()}}, nil
}

// Close ends it.
func (k *Kernel) Close() error { return errors.Join(k.events.Close(), k.conn.Close()) }

// Genid returns the ruleset's counter.
func (k *Kernel) Genid() (uint32, error) { return k.conn.Genid() }

// Witness is Witness of the package.
func (k *Kernel) Witness(family tableid.Family) (string, error) { return Witness(k.conn, family) }

// A Repair puts one table back.
type Repair struct {
	Remedy Remedy
	Want   *Table
	Now    *Table        // for ByRefill
	Age    time.Duration // since Want was read
}

// Write writes repairs, and plants witnesses by their nonces, in one transaction that the kernel
// takes at that genid only. It returns the network devices that the node lacks and that were left
// out. The error is nft.ErrStale if another process wrote, or a *nft.RefusedError.
func (k *Kernel) Write(genid uint32, repairs []Repair, witnesses map[tableid.Family]string) (left []string, err error) {
	b := nft.NewBatch()
	b.Port = k.port
	b.Guard(genid)
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
	b.Finish()
	return left, b.Send()
}

func (r Repair) write(b *nft.Batch) (left []string, err error) {
	o := Options{Age: r.Age, Lacks: lacksDevice}
	switch r.Remedy {
	case ByCreate:
		return r.Want.Create(b, o)
	case ByReplace:
		return r.Want.Replace(b, o)
	case ByRefill:
		return r.Want.Refill(b, r.Now, o)
	}
	return nil, nil
}

func lacksDevice(name string) bool {
	_, err := net.InterfaceByName(name)
	return err != nil
}

// RemoveWitnesses deletes the witnesses of all families.
func RemoveWitnesses(port uint32) error {
	conn, err := nft.Dial()
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

// Repaired reports whether a table is as a repair should leave it, now as a read after it shows.
// After a refill nothing is missing that it put back, and its owner's newer words stand.
func (r Repair) Repaired(now *Table, lacking bool) bool {
	if now == nil {
		return false
	}
	changes := Diff(r.Want, now)
	before := map[string]Change{}
	if r.Remedy == ByRefill {
		for _, c := range Diff(r.Want, r.Now) {
			before[fmt.Sprint(c.Kind, c.Name)] = c
		}
	}
	for _, c := range changes {
		was, differed := before[fmt.Sprint(c.Kind, c.Name)]
		switch {
		case c.Empty, differed && (c.Lost > was.Lost || was.Empty):
			return false
		case !differed && (!lacking || c.Lost > 0 || c.Gone || c.Made):
			return false
		}
	}
	return true
}
