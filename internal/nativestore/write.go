package nativestore

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Kernel reads and writes native tables. It is a *native.Kernel, except in tests.
type Kernel interface {
	Capture(wanted func(nft.Table) bool) (*native.Ruleset, error)
	Witness(family tableid.Family) (native.Witness, error)
	Write(genid uint32, repairs []native.Repair, witnesses map[tableid.Family]string) (left []string, err error)
}

// Tries bounds how many times a repair is planned again because another process wrote.
const Tries = 5

// Lost reports whether a verdict means that content of a native table is missing or does not
// work; "" is no verdict yet.
func Lost(v native.Verdict) bool {
	switch v {
	case "", native.Intact, native.Changed:
		return false
	}
	return true
}

// ErrNotInForce means that the kernel took a write, but a read after it does not show the
// content.
var ErrNotInForce = errors.New("after the write a read does not show the tables as they ought to be")

// ErrNotProved means that the kernel took a write, and that no read shows its effect: the table is
// left out.
var ErrNotProved = errors.New("it was written and is not proved: it is too large to be read (--max-rules)")

// ErrOwnerWrote means that another process wrote between the write and the read after it.
// kube-proxy at 10 changes a second did so after one replay in ten (test/kubeproxy).
var ErrOwnerWrote = errors.New("another process wrote after the write")

// errPartsLeft means that the kernel refused parts of a table, and the rest is in force.
var errPartsLeft = errors.New("could not be put back and is in quarantine")

// PartsLeft is errPartsLeft with the first part; nil if there are none. A restore that leaves
// parts in quarantine is partial, and this is its detail.
func PartsLeft(held []native.Held) error {
	if len(held) == 0 {
		return nil
	}
	more := ""
	if n := len(held) - 1; n > 0 {
		more = fmt.Sprintf(", with %d more,", n)
	}
	return fmt.Errorf("%s%s %w: %s", held[0].Text, more, errPartsLeft, held[0].Why)
}

// AskedRemedy returns the remedy when an operator requests a table; NoRemedy if nothing can or
// need be done. It also covers a table that was deleted alone, or that only the flag dormant
// disables. And it covers the loss of a part in a commit that canaryd missed. now is the
// present table, nil without one.
func AskedRemedy(f native.Finding, now *native.Table) native.Remedy {
	switch {
	case f.Remedy != native.NoRemedy:
		return f.Remedy
	case !Lost(f.Verdict):
		return native.NoRemedy
	case now == nil:
		return native.ByCreate
	case f.Open():
		return native.ByRefill
	case f.Verdict == native.Disabled && len(f.Changes) == 1 && f.Changes[0].Kind == nft.Tables:
		return native.ByReplace
	}
	return native.NoRemedy
}

// ErrDevicesLeft means that a chain or flowtable is back without some of its network devices.
var ErrDevicesLeft = errors.New("network devices that the node lacks were left out")

// DevicesLeft is ErrDevicesLeft with the devices that the node lacks; nil if there are none.
// The restore of the table is then partial.
func DevicesLeft(left []string) error {
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrDevicesLeft, strings.Join(left, ", "))
}

// A Write is the result of repairs that were written at once.
type Write struct {
	Wrote bool            // the kernel took them
	left  []string        // devices that the node lacks
	Proof *native.Ruleset // the last read; nil: there is none after the write
	err   error           // nil: the repairs are in force, but for omitted devices and parts
}

// writeAndProve writes repairs under the genid of a read, and proves them by another read.
// w.err says why not all are proved. If another process wrote since the read, the kernel
// refuses the write (Write.stale).
func writeAndProve(kernel Kernel, genid uint32, repairs []native.Repair) (w Write) {
	if w.left, w.err = kernel.Write(genid, repairs, nil); w.err != nil {
		return w
	}
	w.Wrote = true
	wanted := func(t nft.Table) bool {
		return slices.ContainsFunc(repairs, func(r native.Repair) bool { return r.Want.ID == t.Family.Table(t.Name) })
	}
	if w.Proof, w.err = kernel.Capture(wanted); w.err != nil {
		w.err = fmt.Errorf("it was written, and whether it is in force is unknown: %w", w.err)
		return w
	}
	for _, repair := range repairs {
		if id := repair.Want.ID; !repair.Repaired(w.Proof.Tables[id], len(w.left) > 0) {
			why := ErrNotInForce
			if _, left := w.Proof.LeftOut[id]; left {
				why = ErrNotProved
			} else if w.Proof.Genid != nft.Following(genid) {
				why = ErrOwnerWrote
			}
			w.err = fmt.Errorf("%s: %w", id.NFT(), why)
		}
	}
	return w
}

// Proved reports whether the read shows the repairs in force, perhaps without omitted parts.
func (w Write) Proved() bool { return w.Proof != nil && w.err == nil }

// stale reports whether nothing was written, because another process wrote after the read.
func (w Write) stale() bool { return !w.Wrote && errors.Is(w.err, nft.ErrStale) }

// row returns the entry of a reply for a repair: failed, partial if devices or parts had to be
// left out, or proved.
func (w Write) row(repair native.Repair) api.NativeRestored {
	if w.err != nil {
		return Outcome(repair.Want, reload.Failed, w.err)
	}
	if why := errors.Join(DevicesLeft(w.left), PartsLeft(repair.Held())); why != nil {
		return Outcome(repair.Want, reload.Partial, why)
	}
	return Outcome(repair.Want, reload.Proved, nil)
}

// Outcome returns the entry of a reply for a table; err, which may be nil, is its detail.
func Outcome(t *native.Table, outcome api.Outcome, err error) api.NativeRestored {
	row := api.NativeRestored{Family: t.ID.Family.NFT(), Table: t.ID.NFT(), Outcome: outcome}
	row.Chains, row.Rules, row.Elements = t.Counts()
	if err != nil {
		row.Detail = err.Error()
	}
	return row
}

// Outcomes returns the entries of a reply for tables to put back, and for tables that cannot be
// put back (left). These have failed, because their owner's content is newer. The former count
// the lost rules that base lacks.
func Outcomes(repairs []native.Repair, left []*native.Table, base *baseline.Base) []api.NativeRestored {
	var rows []api.NativeRestored
	for _, repair := range repairs {
		row := Outcome(repair.Want, "", nil)
		row.NotInBaseline = base.LacksLost(flushes.LostTable{Want: repair.Want, Now: repair.Now})
		rows = append(rows, row)
	}
	for _, t := range left {
		rows = append(rows, Outcome(t, reload.Failed, ErrOwnersNewer))
	}
	sorting.Stable(rows, func(a, b api.NativeRestored) int { return cmp.Compare(a.Table, b.Table) })
	return rows
}

// ErrOwnersNewer means that a requested replay would undo a change of the owner.
var ErrOwnersNewer = errors.New("its owner has changed it since; it has to write it again, or `canaryd dismiss` accepts it")
