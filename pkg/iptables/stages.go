package iptables

import (
	"maps"
	"slices"
	"sync/atomic"

	"github.com/canaryd/canaryd/pkg/rules"
)

// InStages calls write for each family of each payload, in their fixed order, and returns all
// results. A family for which write fails has no later turn. Restores on legacy use it, because
// one iptables-restore writes one family.
func InStages(payloads []Payload, write func(rules.Family, []Script) Written) map[rules.Family]Written {
	return EachStage(payloads, func(_ int, p Payload) map[rules.Family]Written {
		written := make(map[rules.Family]Written, len(p))
		for _, family := range slices.Sorted(maps.Keys(p)) {
			written[family] = write(family, p[family])
		}
		return written
	})
}

// EachStage calls write for one payload after the other, and joins its results by family. A
// payload lacks the families for which write failed before. Restores on nft use it, because one
// transaction writes all families.
func EachStage(payloads []Payload, write func(stage int, p Payload) map[rules.Family]Written) map[rules.Family]Written {
	all := map[rules.Family]Written{}
	for _, p := range payloads {
		for family := range p {
			all[family] = Written{}
		}
	}
	for i, p := range payloads {
		due := maps.Clone(p)
		maps.DeleteFunc(due, func(f rules.Family, _ []Script) bool { return all[f].Err != nil })
		if len(due) > 0 {
			for family, w := range write(i, due) {
				all[family] = all[family].then(w)
			}
		}
		for family, w := range all {
			if w.Err == nil {
				w.Stages = i + 1
				all[family] = w
			}
		}
	}
	return all
}

// then returns a family's result after one more payload; EachStage joins results by it.
func (w Written) then(next Written) Written {
	w.Raced, w.Err = w.Raced || next.Raced, next.Err
	w.At, w.Kernel = next.At, w.Kernel+next.Kernel
	w.Direct = slices.Concat(w.Direct, next.Direct)
	w.Detour = oneLine([]error{w.Detour, next.Detour})
	return w
}

// encodedAhead are the batches of payloads that are written one after the other. Each is encoded
// while canaryd waits for an earlier payload, or writes it.
type encodedAhead struct {
	kernel   *Kernel
	payloads []Payload
	batches  []chan *directBatch // of capacity 1
	begun    bool
	unwanted atomic.Bool   // the rest that is not encoded yet
	ended    chan struct{} // closed when nothing more will be encoded
}

// encodeAhead returns the batches of payloads; begin starts to encode them.
func (k *Kernel) encodeAhead(payloads []Payload) *encodedAhead {
	e := &encodedAhead{kernel: k, payloads: payloads, ended: make(chan struct{})}
	for range payloads {
		e.batches = append(e.batches, make(chan *directBatch, 1))
	}
	return e
}

// of reports whether the batches belong to payloads, with exactly the same scripts. Otherwise
// writeAll stops the encoding, and begins another. e may be nil.
func (e *encodedAhead) of(payloads []Payload) bool {
	return e != nil && slices.EqualFunc(e.payloads, payloads, func(a, b Payload) bool {
		return maps.EqualFunc(a, b, func(a, b []Script) bool {
			return slices.EqualFunc(a, b, func(a, b Script) bool {
				return a.Table == b.Table && a.AsText == b.AsText && sameSlice(a.Declare, b.Declare) && sameSlice(a.Steps, b.Steps)
			})
		})
	})
}

// sameSlice reports whether a and b are the same memory.
func sameSlice[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// begin begins to encode the payloads in a goroutine, once. Prepare calls it before the write
// is due; batch calls it in any case.
func (e *encodedAhead) begin() {
	if e.begun {
		return
	}
	e.begun = true
	go func() {
		defer close(e.ended)
		for i, p := range e.payloads {
			if e.unwanted.Load() {
				return
			}
			e.batches[i] <- e.kernel.encode(p)
		}
	}()
}

// batch waits for the batch of a stage and returns it, once; write gets it by encode. due has
// fewer families than the stage's payload if some failed: then it encodes due now.
func (e *encodedAhead) batch(stage int, due Payload) *directBatch {
	e.begin()
	if b := <-e.batches[stage]; len(due) == len(e.payloads[stage]) {
		return b
	}
	return e.kernel.encode(due)
}

// stop cancels all payloads that are not encoded yet, and waits for the current one, which
// still uses the connection. e may be nil. Close, Prepare and writeAll call it.
func (e *encodedAhead) stop() {
	if e == nil || !e.begun {
		return
	}
	e.unwanted.Store(true)
	<-e.ended
}
