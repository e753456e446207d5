package copies

import (
	"errors"
	"net"
	"slices"

	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// An nftWrite is the Write of an OnNFT. Run uses only its fields, and Take takes the results into
// the OnNFT.
type nftWrite struct {
	s      *OnNFT
	tables *standby.Standby
	pieces []*piece
}

// A piece is the write of one copy, or of a part of a copy that is being built.
type piece struct {
	id    tableid.TableID
	copy  *standby.Copy
	stood bool // the kernel had the table before
	more  bool
	err   error
	now   standby.Status
}

// Run implements Write.
func (w *nftWrite) Run() {
	for _, p := range w.pieces {
		p.stood = w.tables.Held(p.id) != nil
		p.more, p.err = w.tables.PutPiece(p.copy)
		p.now = w.tables.Status(p.id)
	}
}

// Take implements Write. After an error there is no copy; the next try builds it again.
func (w *nftWrite) Take() map[tableid.TableID]Copy {
	w.s.writing = nil
	all := make(map[tableid.TableID]Copy, len(w.pieces))
	for _, p := range w.pieces {
		all[p.id] = w.take(p)
	}
	return all
}

// take is Take for one copy. With its socket all copies are gone.
func (w *nftWrite) take(p *piece) Copy {
	err := p.err
	if errors.Is(err, net.ErrClosed) && w.tables == w.s.tables {
		err = errors.Join(err, w.s.dial())
	}
	switch err = w.s.orReleased(p.id, err); {
	case err != nil:
		return Copy{Err: err}
	case p.more && p.stood: // the rebuilt sets of a native table have room for their present elements
		delete(w.s.pending, p.id)
	case !p.more:
		w.s.hold(p.id)
	}
	return Copy{Chains: p.now.Chains, Uncopied: p.now.LeftOut, Unfinished: p.more}
}

// writes reports whether a write is bringing the pending copy of a table into the kernel.
func (s *OnNFT) writes(id tableid.TableID) bool {
	return s.writing != nil && slices.ContainsFunc(s.writing.pieces, func(p *piece) bool { return p.id == id && p.copy == s.pending[id].copy })
}
