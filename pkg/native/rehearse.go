package native

import (
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// An UnreplayableError is a table that this kernel does not take again as it dumps it.
type UnreplayableError struct {
	Table tableid.TableID
	Why   error
}

func (e *UnreplayableError) Error() string {
	return fmt.Sprintf("table %s could not be put back on this kernel: %v", e.Table, e.Why)
}

func (e *UnreplayableError) Unwrap() error { return e.Why }

// rehearsalName is a table that never comes to be.
const rehearsalName = "canaryd-rehearsal"

// Rehearse has the kernel check a table's replay without doing it: under another name, attached
// to nothing, and without the end of the transaction, so that the kernel gives it up. The genid
// does not move and no process is notified. It costs as much as the replay, with the kernel's
// commit lock held. A refusal is an *UnreplayableError.
func (t *Table) Rehearse() error {
	if t.Immune() {
		return fmt.Errorf("table %s: %w", t.ID, ErrImmune)
	}
	b := nft.NewBatch()
	w := newWriter(b, t, Options{})
	w.name = rehearsalName
	w.table(appendNumber(without(t.Attrs, tableFlags), tableFlags, t.Flags|tableDormant))
	if err := w.contents(); err != nil {
		return err
	}
	err := b.Send()
	var refused *nft.RefusedError
	if errors.As(err, &refused) {
		return &UnreplayableError{t.ID, err}
	}
	return err
}
