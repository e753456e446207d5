package native

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// captures bounds the attempts of one capture, which commits of other processes may interrupt.
const captures = 5

// Capture reads the tables that wanted accepts, all at one genid. It repeats a dump that a commit
// interrupts. The error is nft.ErrInterrupted if the commits do not end. Capture also reads tables
// that one process owns: see Table.Immune.
func Capture(conn *nft.Conn, wanted func(nft.Table) bool) (*Ruleset, error) {
	return captureOthers(conn, wanted, knowledge{of: func(uint32, tableid.TableID) *followed { return nil }, budget: newBudget(0)})
}

// knowledge holds the tables that a capture need not read again.
type knowledge struct {
	// of returns a followed table as it is at that genid; nil if the table is not followed.
	of func(genid uint32, id tableid.TableID) *followed
	// whole: the capture takes the whole table from of. Else it takes only sets that cannot have
	// changed.
	whole bool
	// budget chooses the tables that are kept.
	budget budget
}

// captureOthers is Capture that reads only the tables and sets that k lacks. It returns a
// complete capture, or the second of two equal captures: a dump may lack rules without an
// error.
func captureOthers(conn *nft.Conn, wanted func(nft.Table) bool, k knowledge) (*Ruleset, error) {
	var doubtful *Ruleset
	for range captures {
		attempt := k
		attempt.budget.Budget = k.budget.Clone()
		r, err := capture(conn, wanted, attempt)
		switch {
		case errors.Is(err, nft.ErrInterrupted):
			continue
		case err != nil:
			return nil, err
		case r.complete() || doubtful.same(r):
			r.uses = nil
			return r, nil
		}
		doubtful = r
	}
	return nil, fmt.Errorf("reading native tables, %d times: %w", captures, nft.ErrInterrupted)
}

// capture makes one attempt. The error is nft.ErrInterrupted if another process committed
// meanwhile, and captureOthers tries again.
func capture(conn *nft.Conn, wanted func(nft.Table) bool, k knowledge) (*Ruleset, error) {
	genid, err := conn.Genid()
	if err != nil {
		return nil, err
	}
	r := &Ruleset{Genid: genid, At: time.Now(), Tables: map[tableid.TableID]*Table{}, uses: map[tableid.TableID][]uint32{},
		known: map[tableid.TableID]knownTable{}, Fleeting: map[tableid.TableID]bool{}}
	var ids []tableid.TableID
	// The weights are those of tables that exist and are not read now, or that are left out.
	weights, left := map[tableid.TableID]nft.Weight{}, k.budget.Left()
	err = conn.EachTable(func(t nft.Table) error {
		id, take := t.Family.Table(t.Name), wanted(t)
		_, out := left[id]
		if w, known := k.budget.weights[id]; known && (out || !take) {
			weights[id] = w
		}
		if take {
			ids = append(ids, id)
		}
		return nil
	})
	k.budget.weights = weights
	k.budget.Choose(weights)
	dropped := map[tableid.TableID]nft.Weight{}
	for i := 0; i < len(ids) && err == nil; i++ {
		var t *Table
		var w nft.Weight
		f := k.of(genid, ids[i])
		if f != nil && k.whole {
			var digest Digest
			t, digest = f.value()
			r.Tables[t.ID], r.known[t.ID], w = t, knownTable{digest, f.at}, f.weight
		} else if t, w, err = readTable(conn, r, ids[i], f, k.budget.mostOf(ids[i])); errors.Is(err, nft.ErrEnough) {
			err = nil
		}
		if t != nil && t.Fleeting() {
			r.Fleeting[ids[i]] = true
		}
		for id, w := range k.budget.take(ids[i], w) {
			delete(r.Tables, id)
			delete(r.known, id)
			dropped[id] = w
		}
	}
	r.LeftOut, r.budget = dropped, k.budget
	maps.Copy(r.LeftOut, k.budget.Left())
	maps.DeleteFunc(r.LeftOut, func(id tableid.TableID, _ nft.Weight) bool { return r.Tables[id] != nil })
	after, again := conn.Genid()
	switch {
	case again != nil:
		return nil, again
	case after != genid: // the commit may have caused err too
		return nil, nft.ErrInterrupted
	}
	return r, err
}

type reader struct {
	conn *nft.Conn
	t    *Table
	// chains has each chain's index in the table's list, by name.
	chains   map[string]int
	uses     []uint32  // of each chain, as the kernel counts: its rules, and the jumps to it
	followed *followed // the table at that genid; nil if it is not followed
	scale    scale
}

// readTable reads one table into r, for capture. f is the table as the follower has it at r's
// genid, whose sealed sets need no read; nil: it is not followed. The error is
// nft.ErrInterrupted if the table was deleted, or changed its rules, during the read, and
// nft.ErrEnough if its weight is above most. t is then the part that was read, and w its weight.
func readTable(conn *nft.Conn, r *Ruleset, id tableid.TableID, f *followed, most int) (t *Table, w nft.Weight, err error) {
	rd := reader{conn: conn, chains: map[string]int{}, followed: f, scale: scale{most: most}}
	found, err := conn.Object(nft.Tables, id.Family, []nft.StringAttr{{Kind: unix.NFTA_TABLE_NAME, Value: id.Name}},
		func(attrs []byte) (err error) {
			rd.t, err = decodeTable(id.Family, attrs)
			return err
		})
	if err == nil && (!found || rd.t.ID != id) {
		err = nft.ErrInterrupted
	}
	for _, step := range []func() error{rd.readChains, rd.readObjects, rd.readFlowtables, rd.readSets, rd.readElements, rd.readRules} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		return rd.t, rd.scale.Weight, fmt.Errorf("reading table %s: %w", id, err)
	}
	r.Tables[id], r.uses[id] = rd.t, rd.uses
	return rd.t, rd.t.weight(), nil
}

// each calls f for each object of a kind in the table: d is the decoded object, attrs its
// message. f's error, or that of a damaged message, ends the dump.
func (rd *reader) each(kind nft.ObjectKind, f func(d decoded, attrs []byte) error) error {
	table := []nft.StringAttr{{Kind: forms[kind].table, Value: rd.t.ID.Name}}
	return rd.conn.EachObject(kind, rd.t.ID.Family, table, func(attrs []byte) error {
		d, err := decode(kind, attrs)
		if err != nil || d.table != rd.t.ID.Name { // the kernel dumps chains and other kinds of all tables
			return err
		}
		return f(d, attrs)
	})
}

// readChains dumps the table's chains, with the use counts by which complete checks the rules
// later.
func (rd *reader) readChains() error {
	return rd.each(nft.Chains, func(d decoded, attrs []byte) error {
		rd.chains[d.name] = len(rd.t.Chains)
		rd.t.Chains = append(rd.t.Chains, d.chain(attrs))
		rd.uses = append(rd.uses, number(attrs, unix.NFTA_CHAIN_USE))
		return rd.scale.add(weightOf(d.attrs))
	})
}

// readObjects dumps the table's stateful objects, as a step of readTable. Old kernels have
// none.
func (rd *reader) readObjects() error {
	return unlessUnknown(rd.each(nft.Objects, func(d decoded, attrs []byte) error {
		rd.t.Objects = append(rd.t.Objects, d.object(attrs))
		return rd.scale.add(weightOf(d.attrs))
	}))
}

// readFlowtables dumps the table's flowtables, without their flows, as a step of readTable.
// Kernels without flowtables have none.
func (rd *reader) readFlowtables() error {
	return unlessUnknown(rd.each(nft.Flowtables, func(d decoded, _ []byte) error {
		rd.t.Flowtables = append(rd.t.Flowtables, Flowtable{d.name, d.handle, d.attrs})
		return rd.scale.add(weightOf(d.attrs))
	}))
}

// unlessUnknown drops the error of a kernel that does not know a kind of object: an old kernel,
// or a kernel without flowtables. Such a kernel has no such objects, so the read continues.
func unlessUnknown(err error) error {
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EOPNOTSUPP) {
		return nil
	}
	return err
}

// readSets dumps the table's sets. readElements reads their elements after it.
func (rd *reader) readSets() error {
	return rd.each(nft.Sets, func(d decoded, attrs []byte) error {
		rd.t.Sets = append(rd.t.Sets, d.set(attrs))
		return rd.scale.add(weightOf(d.attrs))
	})
}

// elementsOf dumps the elements of one set, in the kernel's order: callers sort them. ENOENT in
// the error means that the set is gone, and nft.ErrEnough that it is too large for s.
func elementsOf(conn *nft.Conn, id tableid.TableID, set string, s *scale) (all []Element, err error) {
	err = conn.EachObject(nft.Elements, id.Family, []nft.StringAttr{
		{Kind: unix.NFTA_SET_ELEM_LIST_TABLE, Value: id.Name},
		{Kind: unix.NFTA_SET_ELEM_LIST_SET, Value: set},
	}, func(attrs []byte) error {
		var w nft.Weight
		err := decodeElements(attrs, func(e Element) {
			all = append(all, e)
			w.Bytes += elementBytes + len(e)
		})
		return cmp.Or(err, s.add(w))
	})
	if err != nil {
		return nil, fmt.Errorf("set %s: %w", set, err)
	}
	return all, nil
}

// readElements dumps the elements of one set after the other: the kernel has no dump for all
// sets. It takes the elements of a sealed set from the follower. readTable calls it behind
// readSets.
func (rd *reader) readElements() error {
	for i := range rd.t.Sets {
		s := &rd.t.Sets[i]
		if heard := rd.followed.sealed(s); heard != nil {
			s.Elements = heard.Elements
			own := weightOf(s.Attrs) // which readSets has added
			if err := rd.scale.add(nft.Weight{Rules: heard.weight.Rules, Bytes: heard.weight.Bytes - own.Bytes}); err != nil {
				return err
			}
			continue
		}
		var err error
		if s.Elements, err = elementsOf(rd.conn, rd.t.ID, s.Name, &rd.scale); err != nil {
			return err
		}
		s.sort()
	}
	return nil
}

// readRules dumps the rules of all chains. Each rule names the rule in front of it. If that is
// not the last rule that was read of the chain, a commit came between, and the capture begins
// again.
func (rd *reader) readRules() error {
	return rd.each(nft.Rules, func(d decoded, attrs []byte) error {
		i, found := rd.chains[d.name]
		if !found {
			return nft.ErrInterrupted
		}
		c := &rd.t.Chains[i]
		if before := handleBefore(attrs); before != lastHandle(c) {
			return nft.ErrInterrupted
		}
		c.Rules = append(c.Rules, Rule{d.handle, d.attrs})
		return rd.scale.add(nft.Weight{Rules: 1, Bytes: len(d.attrs)})
	})
}

// handleBefore returns the handle of the preceding rule, 0 if the rule is the first. A read
// checks the order by it, and the follower places a new rule; a notification may lack it.
func handleBefore(attrs []byte) uint64 {
	n, err := nft.AttrUint64(attrOf(attrs, unix.NFTA_RULE_POSITION))
	if err != nil {
		return 0
	}
	return n
}

// lastHandle returns the handle of the last rule that was read of a chain; 0: none yet. It must
// be handleBefore of the next.
func lastHandle(c *Chain) uint64 {
	if len(c.Rules) == 0 {
		return 0
	}
	return c.Rules[len(c.Rules)-1].Handle
}

// complete reports whether the kernel's use count of each chain matches the rules and jumps
// that were read; else captureOthers reads again. The kernel continues a dump by counting
// rules, and it counts rules of an unfinished transaction too. If the kernel gives that
// transaction up, no genid shows it (nf_tables_dump_rules, Linux 6.18).
func (r *Ruleset) complete() bool {
	for id, t := range r.Tables {
		if r.followed(id) {
			continue
		}
		used := map[string]int{}
		for name := range t.jumps() {
			used[name]++
		}
		for i := range t.Chains {
			if c := &t.Chains[i]; int(r.uses[id][i]) != len(c.Rules)+used[c.Name] {
				return false
			}
		}
	}
	return true
}

// same reports whether two captures have the same content. A nil r never has. Two equal
// captures count as complete, although use counts differ.
func (r *Ruleset) same(o *Ruleset) bool {
	if r == nil || r.Genid != o.Genid || len(r.Tables) != len(o.Tables) {
		return false
	}
	for id := range r.Tables {
		if o.Tables[id] == nil || r.Digest(id) != o.Digest(id) {
			return false
		}
	}
	return true
}
