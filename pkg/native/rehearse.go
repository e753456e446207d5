package native

import (
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// An UnreplayableError reports a table that this kernel does not accept again as it dumps it.
type UnreplayableError struct {
	Table tableid.TableID
	Why   error // the first refusal
	// Parts are the refused parts of the table, and the parts that could not be restored without
	// them. It is empty if the kernel refuses the table as a whole.
	Parts []Held
}

// Error names the first refused part, how many more there are, and the kernel's reason. Logs
// and reports show it.
func (e *UnreplayableError) Error() string {
	if len(e.Parts) == 0 {
		return fmt.Sprintf("table %s could not be put back on this kernel: %v", e.Table, e.Why)
	}
	more := ""
	if n := len(e.Parts) - 1; n > 0 {
		more = fmt.Sprintf(", and %d more of that table", n)
	}
	return fmt.Sprintf("of table %s, %s could not be put back on this kernel%s: %v", e.Table, e.Parts[0].Text, more, e.Why)
}

func (e *UnreplayableError) Unwrap() error { return e.Why }

// rehearsalName is the table's name in a rehearsal. The kernel never makes that table.
const rehearsalName = "canaryd-rehearsal"

// Rehearse has the kernel check a table's replay without doing it. The rehearsed table has another
// name and is attached to nothing. The transaction has no end, so the kernel gives it up. The genid
// does not change and no process is notified. A rehearsal costs as much as the replay, with the
// kernel's commit lock held. A refusal is an *UnreplayableError.
func (t *Table) Rehearse() error {
	if t.Immune() {
		return fmt.Errorf("table %s: %w", t.ID, ErrImmune)
	}
	r, first := Repair{Want: t}, error(nil)
	write := func(seek *seeker) (*nft.Batch, error) {
		b := nft.NewBatch()
		w := newWriter(b, t, Options{held: r.held, single: r.single, seek: seek})
		w.name = rehearsalName
		w.table(appendNumber(without(t.Attrs, tableFlags), tableFlags, t.Flags|tableDormant))
		return b, w.contents()
	}
	for range refusalsMost {
		b, err := write(nil)
		if err != nil {
			return err
		}
		err = b.Send()
		var refused *nft.RefusedError
		switch {
		case !errors.As(err, &refused) && (err != nil || first == nil):
			return err
		case err == nil:
			return &UnreplayableError{t.ID, first, r.Held()}
		case first == nil:
			first = err
		}
		s := &seeker{messages: refused.Messages}
		if _, err := write(s); err != nil {
			return err
		}
		if !blames(refused) || s.hits < len(refused.Messages) || !r.leave(s.found, refused.Errno.Error()) {
			break
		}
	}
	return &UnreplayableError{t.ID, first, nil}
}

// Piece returns a part of a table that can be rehearsed by itself, of about most rules and
// elements. next is the beginning of the next piece; 0: there is none. The first piece begins
// at 0. A piece has all parts that it names: chains without their rules, and sets without their
// elements.
func (t *Table) Piece(from, most int) (piece *Table, next int) {
	size := 0
	for i := range t.Chains {
		size += 1 + len(t.Chains[i].Rules)
	}
	for i := range t.Sets {
		size += 1 + len(t.Sets[i].Elements)
	}
	if size <= most {
		return t, 0
	}
	p := cutter{holder: indexed(t), from: from, to: from + most, taken: map[Spot]bool{}}
	for i := range t.Chains {
		c := &t.Chains[i]
		if c.Bound {
			continue
		}
		p.unit(Spot{Kind: nft.Chains, At: i}, nil)
		for j, r := range c.Rules {
			p.unit(Spot{nft.Rules, i, j}, r.expressions)
		}
	}
	for i := range t.Sets {
		s := &t.Sets[i]
		if s.Anonymous() {
			continue
		}
		p.unit(Spot{Kind: nft.Sets, At: i}, nil)
		for j, e := range s.Elements {
			if p.at == p.to && isEnd(e) {
				p.to++ // no interval is cut
			}
			p.unit(Spot{nft.Elements, i, j}, func() []byte { return expressionsOf(s, e) })
		}
	}
	return p.piece(), p.next
}

// A cutter cuts a piece out of a table.
type cutter struct {
	*holder
	from, to, at, next int
	taken              map[Spot]bool
}

// unit takes a part of the table, and the parts that it names, if it belongs to this piece.
// Piece calls it for each part in turn, so its calls count the parts. names returns the part's
// expressions; nil: it has none.
func (p *cutter) unit(s Spot, names func() []byte) {
	switch {
	case p.at >= p.to && p.next == 0:
		p.next = p.at
	case p.at >= p.from && p.at < p.to:
		p.taken[s] = true
		switch s.Kind {
		case nft.Rules:
			p.taken[Spot{Kind: nft.Chains, At: s.At}] = true
		case nft.Elements:
			p.taken[Spot{Kind: nft.Sets, At: s.At}] = true
		}
		if names != nil {
			p.eachNamed(names(), func(s Spot) { p.taken[s] = true })
		}
	}
	p.at++
}

// piece returns a table of the taken parts, for Piece. Nameless parts are whole. The first
// piece also has all objects and flowtables.
func (p *cutter) piece() *Table {
	t := *p.t
	t.Chains, t.Sets = nil, nil
	t.Objects = kept(p.t.Objects, func(i int) bool { return p.from == 0 || p.taken[Spot{Kind: nft.Objects, At: i}] })
	t.Flowtables = kept(p.t.Flowtables, func(i int) bool { return p.from == 0 || p.taken[Spot{Kind: nft.Flowtables, At: i}] })
	for i, c := range p.t.Chains {
		if p.taken[Spot{Kind: nft.Chains, At: i}] {
			c.Rules = kept(c.Rules, func(j int) bool { return c.Bound || p.taken[Spot{nft.Rules, i, j}] })
			t.Chains = append(t.Chains, c)
		}
	}
	for i, s := range p.t.Sets {
		if p.taken[Spot{Kind: nft.Sets, At: i}] {
			s.Elements = kept(s.Elements, func(j int) bool { return s.Anonymous() || p.taken[Spot{nft.Elements, i, j}] })
			t.Sets = append(t.Sets, s)
		}
	}
	return &t
}
