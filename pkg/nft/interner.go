package nft

import (
	"encoding/binary"
	"errors"
	"hash/maphash"
)

// An Interner numbers byte strings, from 1, so that equal strings have equal
// numbers. A map of strings would need twice the memory, which is some MB for the
// 57,000 atoms of 5,000 services.
type Interner struct {
	chunks [][]byte // contain the strings, each after its length
	at     []uint32 // by number-1: the chunk's number and the place in it
	index  Index
	seed   maphash.Seed
}

func NewInterner() Interner { return Interner{seed: maphash.MakeSeed()} }

const (
	chunkBits = 16
	chunkSize = 1 << chunkBits
	// internMost is the longest string. The kernel's rules are far shorter: they
	// have at most 128 expressions of some hundred bytes.
	internMost = chunkSize - 2
)

var errTooLong = errors.New("a rule is too long to be kept")

// Number returns the string's number; it copies and numbers a string that it does not have
// yet. The error means that the string is too long.
func (n *Interner) Number(text []byte) (uint32, error) {
	hash := maphash.Bytes(n.seed, text)
	if found := n.index.Find(hash, func(i uint32) bool { return string(n.Text(i)) == string(text) }); found != 0 {
		return found, nil
	}
	if len(text) > internMost {
		return 0, errTooLong
	}
	last := len(n.chunks) - 1
	if last < 0 || len(n.chunks[last])+2+len(text) > chunkSize {
		n.chunks = append(n.chunks, make([]byte, 0, chunkSize))
		last++
	}
	chunk := n.chunks[last]
	n.at = append(n.at, uint32(last<<chunkBits|len(chunk)))
	chunk = binary.NativeEndian.AppendUint16(chunk, uint16(len(text)))
	n.chunks[last] = append(chunk, text...)
	added := uint32(len(n.at))
	n.index.Add(added, func(i uint32) uint64 { return maphash.Bytes(n.seed, n.Text(i)) })
	return added, nil
}

// Text returns the string of that number. It must not be changed.
func (n *Interner) Text(number uint32) []byte {
	at := n.at[number-1]
	b := n.chunks[at>>chunkBits][at&(chunkSize-1):]
	return b[2 : 2+binary.NativeEndian.Uint16(b)]
}

// An Index finds numbers, which are not 0, by a hash of the numbered things. The
// zero value is empty. It is an open hash table, with 5 to 11 bytes for a number.
type Index struct {
	slots []uint32 // their number is a power of two
	used  int
}

// Find returns the number that has the hash and that same accepts, 0 if there is none. same
// compares the numbered thing itself, because hashes may collide.
func (x *Index) Find(hash uint64, same func(uint32) bool) uint32 {
	if len(x.slots) == 0 {
		return 0
	}
	mask := uint64(len(x.slots) - 1)
	for i := hash & mask; x.slots[i] != 0; i = (i + 1) & mask {
		if same(x.slots[i]) {
			return x.slots[i]
		}
	}
	return 0
}

// Add adds a number, which the index must not have. hashOf returns the hash of any number in
// the index, and of this one: the index may have to grow.
func (x *Index) Add(number uint32, hashOf func(uint32) uint64) {
	if 4*x.used >= 3*len(x.slots) {
		old := x.slots
		x.slots = make([]uint32, max(16, 2*len(old)))
		for _, n := range old {
			if n != 0 {
				x.put(n, hashOf(n))
			}
		}
	}
	x.used++
	x.put(number, hashOf(number))
}

// put puts a number into the first free slot from its hash on. Add keeps a quarter of the
// slots free.
func (x *Index) put(number uint32, hash uint64) {
	mask := uint64(len(x.slots) - 1)
	i := hash & mask
	for x.slots[i] != 0 {
		i = (i + 1) & mask
	}
	x.slots[i] = number
}
