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

// nativePending is a copy and the digest of what it was made of.
type nativePending struct {
	of   native.Digest
	copy *standby.Copy
}

// Follow implements NativeStandby.
func (s nativeOnNFT) Follow(want NativeWant) StandbyCopy {
	id := want.Table.ID
	c, err := s.translate(want)
	more, stood := false, s.tables.Held(id) != nil
	if err == nil {
		more, err = s.tables.PutPiece(c)
	}
	if more && stood { // it is built again, with sets that have room for what they hold now
		delete(s.natives, id)
	}
	if errors.Is(err, net.ErrClosed) {
		err = errors.Join(err, s.dial()) // it is built at the next try
	}
	if err != nil { // what the loop says is not there takes no memory
		err = errors.Join(err, s.Release(id))
	}
	return StandbyCopy{Chains: s.tables.Status(id).Chains, Unfinished: more, Err: err}
}

// translate makes the copy of a table, or returns what it made of the same content. Another value
// comes every 2 s where packets add to sets and after each replay, and an opening does not wait for
// what that changes.
func (s nativeOnNFT) translate(want NativeWant) (*standby.Copy, error) {
	id := want.Table.ID
	if p := s.natives[id]; p.copy != nil && p.of == want.Digest {
		return p.copy, nil
	}
	c, err := standby.TranslateNative(want.Table, s.tables.Held(id))
	if err != nil {
		return nil, err
	}
	s.natives[id] = nativePending{want.Digest, c}
	return c, nil
}

// Gate implements NativeStandby. A gate that is open for so long that the loop must be hanging is
// shut all the same.
func (s nativeOnNFT) Gate(want NativeWant, order GateOrder) (got StandbyGate, err error) {
	id := want.Table.ID
	before := s.tables.Commits()
	if order != ShutGate {
		got.Outdated, err = s.open(want, order)
	} else {
		got.Shut, err = s.shut(id)
	}
	got.Open = len(s.tables.OpenHooks(id)) > 0
	got.Commits = int(s.tables.Commits() - before)
	return got, err
}

// open opens all hooks: the table's one owner has no exemptions of others in it.
func (s nativeOnNFT) open(want NativeWant, order GateOrder) (outdated, err error) {
	id := want.Table.ID
	held := s.tables.Held(id)
	if held == nil {
		return nil, standby.ErrNotBuilt
	}
	pending, err := s.translate(want)
	return s.openHooks(id, held.Hooks(), pending, err, order)
}

// Release implements NativeStandby.
func (s nativeOnNFT) Release(id tableid.TableID) error {
	s.endLimit(id)
	delete(s.natives, id)
	return s.tables.Remove(id)
}
