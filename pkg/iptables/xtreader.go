package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"hash/fnv"
	"slices"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An xtReader reads legacy x_tables through one socket for each open family.
type xtReader struct{ sockets map[rules.Family]*xtSocket }

// close closes all sockets.
func (r xtReader) close() error {
	var err error
	for _, s := range r.sockets {
		err = errors.Join(err, s.close())
	}
	return err
}

// stamp hashes GET_INFO of the listed tables: counts, size and hooks. It implements reader, for
// Kernel.Stamp; it reads no rule.
func (r xtReader) stamp(_ context.Context, family rules.Family) (Stamp, error) {
	var stamp Stamp
	sum := fnv.New64a()
	err := r.sockets[family].shapes(func(table rules.TableName, info xtInfo) {
		sum.Write(info.raw[:])
		if i := slices.Index(protect.Tables(), table); i >= 0 {
			own := fnv.New64a()
			own.Write(info.raw[:])
			stamp.Shapes[i] = Shape{Value: own.Sum64(), Size: info.size}
		}
	})
	if err != nil {
		return Stamp{}, err
	}
	stamp.Value = sum.Sum64()
	return stamp, nil
}

func (r xtReader) digest(ctx context.Context, family rules.Family) (uint64, error) {
	probed, err := r.probe(ctx, family, nil)
	return probed.Digest, err
}

// sums returns the digest of a family with the checksum of each of its tables.
func (r xtReader) sums(ctx context.Context, family rules.Family) (digest uint64, sums map[rules.TableName]uint64, err error) {
	p := newXTProbe(family, nil)
	sums = map[rules.TableName]uint64{}
	err = r.sockets[family].walk(ctx, nil, func(table rules.TableName, info xtInfo, data []byte) error {
		err := p.table(table, info, data)
		sums[table] = tableSum(info, data)
		return err
	})
	return p.sum.value(), sums, err
}

// tableSum returns a checksum of a walked table, which has masked bytes.
func tableSum(info xtInfo, data []byte) uint64 {
	sum := newChecksum()
	sum.table(info, data)
	return sum.value()
}

// probe walks every listed table, because the digest covers all of them. It implements reader,
// for Kernel.Probe; digest calls it without places.
func (r xtReader) probe(ctx context.Context, family rules.Family, places []Place) (Probed, error) {
	p := newXTProbe(family, places)
	err := r.sockets[family].walk(ctx, nil, p.table)
	if err != nil {
		return Probed{}, err
	}
	return p.probed(), nil
}

// probeOnly walks only the listed tables of the places, for Kernel.ProbeOnly. A place whose
// table is not listed has NoTable.
func (r xtReader) probeOnly(ctx context.Context, family rules.Family, places []Place) (map[Place]Holding, error) {
	p := newXTProbe(family, places)
	err := r.sockets[family].walk(ctx, func(table rules.TableName) bool {
		return slices.ContainsFunc(places, func(p Place) bool { return p.Table == table })
	}, p.table)
	if err != nil {
		return nil, err
	}
	return p.holdings, nil
}

// An xtProbe collects one probe's results during a walk.
type xtProbe struct {
	family   rules.Family
	holdings map[Place]Holding
	sum      checksum
}

// A checksum is two CRCs of different polynomials, which together have 64 bits. Processors have
// instructions for both: 8 MB take 1 ms. SHA-256 takes 7 ms, as much as the rest of a walk.
// Forging a checksum is useless: a process that may write tables may also stop canaryd.
type checksum struct{ high, low uint32 }

// newChecksum begins at {1, 1}, so that a family without tables does not look like a missing
// digest.
func newChecksum() checksum { return checksum{1, 1} }

// table adds a walked table, with its name and its size, to a family's digest. The walk must
// have masked the counters, or each packet would change the digest.
func (c *checksum) table(info xtInfo, data []byte) {
	c.add(info.raw[:xtTableNameLen])
	c.add(binary.NativeEndian.AppendUint32(nil, uint32(len(data))))
	c.add(data)
}

func (c *checksum) add(data []byte) {
	c.high = crc32.Update(c.high, crc32.MakeTable(crc32.Castagnoli), data)
	c.low = crc32.Update(c.low, crc32.IEEETable, data)
}

func (c *checksum) value() uint64 { return uint64(c.high)<<32 | uint64(c.low) }

// newXTProbe returns a probe of these places, which has NoTable for each until its table is
// walked.
func newXTProbe(family rules.Family, places []Place) *xtProbe {
	p := &xtProbe{family: family, holdings: make(map[Place]Holding, len(places)), sum: newChecksum()}
	for _, place := range places {
		p.holdings[place] = Holding{}
	}
	return p
}

// table walks one table for probe and probeOnly, and notes the holdings of the places in it.
// The walk masks bytes that are not content, and the rest enters the digest.
func (l *xtProbe) table(table rules.TableName, info xtInfo, data []byte) error {
	for place, holding := range l.holdings {
		if place.Table == table {
			holding.Presence = NoChain
			l.holdings[place] = holding
		}
	}
	var here Place
	var holding Holding
	wanted := false
	err := walkEntries(l.family, info, data, xtVisitor{
		chain: func(name string, _ int) {
			here, holding = Place{Table: table, Chain: name}, Holding{Presence: Present}
			_, wanted = l.holdings[here]
		},
		rule: func(r xtRule) {
			holding.Rules++
			if wanted && r.hasComment && !r.target {
				holding.Comments = append(holding.Comments, string(r.comment))
			}
		},
		end: func(xtRule) {
			if wanted {
				l.holdings[here] = holding
			}
		},
	})
	l.sum.table(info, data)
	return err
}

func (l *xtProbe) probed() Probed {
	return Probed{Holdings: l.holdings, Digest: l.sum.value()}
}
