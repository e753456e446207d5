package iptables

import (
	"encoding/binary"
	"errors"
	"hash/maphash"
)

// An interner numbers byte strings, from 1, so that equal ones have equal
// numbers. A map of strings does the same in twice the memory, which for 57,000
// atoms of 5,000 services are some MB.
type Interner struct {
	chunks [][]byte // in which the strings lie, each behind its length
	at     []uint32 // by number-1: the chunk's number and the place in it
	index  Index
	seed   maphash.Seed
}

func NewInterner() Interner { return Interner{seed: maphash.MakeSeed()} }

const (
	chunkBits = 16
	chunkSize = 1 << chunkBits
	// internMost is how long a string may be: no rule of the kernel's (at
	// most 128 expressions of some hundred bytes) comes near.
	internMost = chunkSize - 2
)

var errTooLong = errors.New("a rule is too long to be kept")

// number returns the string's number.
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

// text returns the string of that number. It must not be changed.
func (n *Interner) Text(number uint32) []byte {
	at := n.at[number-1]
	b := n.chunks[at>>chunkBits][at&(chunkSize-1):]
	return b[2 : 2+binary.NativeEndian.Uint16(b)]
}

// An index finds numbers, which are not 0, by a hash of what they stand for. The
// zero value is empty. It is an open hash table: 5 to 11 bytes for a number.
type Index struct {
	slots []uint32 // a power of two of them
	used  int
}

// find returns the number with that hash that same accepts, 0 if there is none.
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

// add puts in a number; hashOf must know all that are in, and this one.
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

func (x *Index) put(number uint32, hash uint64) {
	mask := uint64(len(x.slots) - 1)
	i := hash & mask
	for x.slots[i] != 0 {
		i = (i + 1) & mask
	}
	x.slots[i] = number
}
