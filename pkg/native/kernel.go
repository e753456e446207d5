package native

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Kernel is nf_tables of this network namespace, for a guard of native tables. It hears of
// commits, reads and writes. A LateKernel opens it. It is for one goroutine.
type Kernel struct {
	conn   *nft.Conn
	events *nft.Events
	port   uint32
	hearing
	budget       budget                  // of the tables that are kept
	taken        map[tableid.Family]bool // families in which another process has a table of the witness's name
	afterCapture func()                  // for tests: it runs between a read and the later notifications
}

// Close closes the sockets.
func (k *Kernel) Close() error { return errors.Join(k.events.Close(), k.conn.Close()) }

// Genid returns nf_tables' number of the last commit.
func (k *Kernel) Genid() (uint32, error) { return k.conn.Genid() }

// Witness is FindWitness. Later writes and notifications refer to the witness that it found: a
// deed has WitnessLost if the commit deleted a table of that name.
func (k *Kernel) Witness(family tableid.Family) (Witness, error) {
	w, err := FindWitness(k.conn, family)
	if err == nil {
		k.setWitness(family, w)
	}
	return w, err
}

// setWitness notes a family's witness: its name, for the deeds of later commits, and whether
// another process has the usual name, for the next planting.
func (k *Kernel) setWitness(family tableid.Family, w Witness) {
	if k.taken == nil {
		k.taken, k.rec.names = map[tableid.Family]bool{}, map[tableid.Family]string{}
	}
	k.taken[family], k.rec.names[family] = w.Taken, w.Table
}

// Write writes repairs, and plants witnesses by their nonces, in one transaction that the kernel
// accepts only at that genid. If the kernel refuses parts of a table, Write leaves them out, with
// all parts that must not be written without them. Then it sends the transaction again. Repair.Held
// names these parts. left are the network devices that were left out, because the node lacks them.
// The error is nft.ErrStale if another process wrote, or a *nft.RefusedError.
func (k *Kernel) Write(genid uint32, repairs []Repair, witnesses map[tableid.Family]string) (left []string, err error) {
	for range refusalsMost {
		b := nft.NewBatch()
		b.Port = k.port
		b.Guard(genid)
		if left, err = k.Append(b, repairs, witnesses); err != nil {
			return nil, err
		}
		if b.Messages() == 1 && slices.ContainsFunc(repairs, func(r Repair) bool { return !r.Whole() }) {
			return left, nil // all parts are refused, and even an empty commit notifies everyone
		}
		b.Finish()
		err = b.Send()
		var refused *nft.RefusedError
		if !errors.As(err, &refused) || !leaveRefused(refused, repairs, func(b *nft.Batch) error { return k.plant(b, witnesses) }) {
			return left, err
		}
	}
	return nil, err
}

// Append is Write into a batch of the caller, who guards and sends it: a replay of iptables'
// rules takes native tables along. It leaves out nothing but devices (left).
func (k *Kernel) Append(b *nft.Batch, repairs []Repair, witnesses map[tableid.Family]string) (left []string, err error) {
	if err := k.plant(b, witnesses); err != nil {
		return nil, err
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

// plant writes witnesses into a batch by their nonces. It notes them at once, so a caller whose
// batch fails must plant or find them again. leaveRefused calls it to number the messages
// alike.
func (k *Kernel) plant(b *nft.Batch, witnesses map[tableid.Family]string) error {
	for _, family := range slices.Sorted(maps.Keys(witnesses)) {
		w := NewWitness(witnesses[family], k.taken[family])
		if err := plantWitness(b, family, w.Table, w.Nonce); err != nil {
			return err
		}
		k.setWitness(family, w)
	}
	return nil
}

// RemoveWitnesses deletes the witnesses of all families, for the cleanup of a node. Tables of
// other processes with such a name stay. port is the netlink address of the transactions.
func RemoveWitnesses(port uint32) error {
	return removeOwn(port, func(t nft.Table) bool { return strings.HasPrefix(t.Name, WitnessName) }, func(comment string) bool { return comment != "" })
}

// removeOwn deletes canaryd's own tables: is accepts their names, and ours their comments. A
// table that vanishes meanwhile is no error.
func removeOwn(port uint32, is func(nft.Table) bool, ours func(comment string) bool) error {
	conn, _, err := nft.DialIfAny()
	if conn == nil {
		return err
	}
	defer func() { _ = conn.Close() }() // it was only read from
	var named []tableid.TableID
	for range captures {
		named = nil
		err = conn.EachTable(func(t nft.Table) error {
			if is(t) {
				named = append(named, t.Family.Table(t.Name))
			}
			return nil
		})
		if !errors.Is(err, nft.ErrInterrupted) {
			break
		}
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range named {
		var text string
		_, err := conn.Object(nft.Tables, id.Family, []nft.StringAttr{{Kind: unix.NFTA_TABLE_NAME, Value: id.Name}}, func(attrs []byte) error {
			if number(attrs, tableFlags)&tableOwned == 0 {
				text = comment(attrOf(attrs, tableUserdata))
			}
			return nil
		})
		if err == nil && ours(text) {
			b := nft.NewBatch()
			b.Port = port
			Delete(b, id)
			b.Finish()
			err = b.Send()
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Counts returns how many chains, rules and elements of named sets the table has, for reports
// and for the comparison of two contents. Chains that belong to rules do not count, but their
// rules do.
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
