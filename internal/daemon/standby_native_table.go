package daemon

import (
	"errors"
	"net"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeOnNFT is the NativeStandby of a StandbyOnNFT: it writes through the same socket.
type nativeOnNFT struct{ *StandbyOnNFT }

// Native returns the NativeStandby that has its tables on the same socket. It works on
// iptables-legacy too.
func (s *StandbyOnNFT) Native() NativeStandby { return nativeOnNFT{s} }

// nativePending is a copy and the table of which it was made.
type nativePending struct {
	of   *native.Table
	copy *standby.Copy
}

// Follow implements NativeStandby.
func (s nativeOnNFT) Follow(want *native.Table) StandbyCopy {
	c, err := s.translate(want)
	more, stood := false, s.tables.Held(want.ID) != nil
	if err == nil {
		more, err = s.tables.PutPiece(c)
	}
	if more && stood { // it is built again, with sets that have room for what they hold now
		delete(s.natives, want.ID)
	}
	if errors.Is(err, net.ErrClosed) {
		err = errors.Join(err, s.dial()) // it is built at the next try
	}
	if err != nil { // what the loop says is not there takes no memory
		err = errors.Join(err, s.Release(want.ID))
	}
	return StandbyCopy{Chains: s.tables.Status(want.ID).Chains, Unfinished: more, Err: err}
}

// translate makes the copy of a table, or returns what it made of the same content. Another value
// comes every 2 s where packets add to sets, and an opening does not wait for what that changes.
func (s nativeOnNFT) translate(want *native.Table) (*standby.Copy, error) {
	if p := s.natives[want.ID]; p.of != nil && len(native.Diff(p.of, want)) == 0 {
		s.natives[want.ID] = nativePending{want, p.copy} // with which the next value shares most memory
		return p.copy, nil
	}
	c, err := standby.TranslateNative(want, s.tables.Held(want.ID))
	if err != nil {
		return nil, err
	}
	s.natives[want.ID] = nativePending{want, c}
	return c, nil
}

// Gate implements NativeStandby. A gate that is open for so long that the loop must be hanging is
// shut all the same.
func (s nativeOnNFT) Gate(want *native.Table, order GateOrder) (got StandbyGate, err error) {
	if order != ShutGate {
		got.Outdated, err = s.open(want, order)
	} else {
		got.Shut, err = s.shut(want.ID)
	}
	got.Open = len(s.tables.Status(want.ID).Open) > 0
	return got, err
}

// open opens all hooks: the table's one owner has no exemptions of others in it.
func (s nativeOnNFT) open(want *native.Table, order GateOrder) (outdated, err error) {
	held := s.tables.Held(want.ID)
	if held == nil {
		return nil, standby.ErrNotBuilt
	}
	pending, err := s.translate(want)
	return s.openHooks(want.ID, held.Hooks(), pending, err, order)
}

// Release implements NativeStandby.
func (s nativeOnNFT) Release(id tableid.TableID) error {
	s.endLimit(id)
	delete(s.natives, id)
	return s.tables.Remove(id)
}
