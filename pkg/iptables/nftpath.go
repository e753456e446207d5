package iptables

import (
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A directResult is what became of a payload on the direct path.
type directResult struct {
	// err is ErrStale, or a *RestoreError where there is to be no other
	// path; nothing was written then.
	err error
	// moved is by how much our commit moved the genid, at when it was done, and
	// took what the kernel took for it.
	moved uint32
	at    time.Time
	took  time.Duration
	wrote map[rules.Family][]rules.TableName
	// left is what iptables-restore has to write, and detour why.
	left   Payload
	detour map[rules.Family]error
	// refused is the kernel's answer, if it refused a message, and sent the batch that it refused.
	refused *nft.RefusedError
	sent    *directBatch
}

// A directBatch is a payload as one transaction that is not sent yet, as far as it
// can be written directly. It has no end: a rider may follow.
type directBatch struct {
	writer directWriter
	result directResult // if the kernel takes it
}

// encode encodes what can be written directly of all families as one transaction.
// It returns nil if there is no direct path.
func (k *Kernel) encode(payload Payload) *directBatch { return k.encodeWith(payload, nil) }

// encodeWith is encode with bytes of rules that else could not be written directly.
func (k *Kernel) encodeWith(payload Payload, known taught) *directBatch {
	return k.encodeSeeking(payload, known, 0)
}

// encodeSeeking is encodeWith that finds the rule of a message.
func (k *Kernel) encodeSeeking(payload Payload, known taught, message int) *directBatch {
	conn := k.directConn()
	if conn == nil {
		return nil
	}
	w := directWriter{conn: conn, source: k.source, taught: known, batch: nft.NewBatch(), sets: &usedNumbers{index: k.sets}, sought: message}
	result := directResult{left: Payload{}, wrote: map[rules.Family][]rules.TableName{}, detour: map[rules.Family]error{}}
	for _, family := range slices.Sorted(maps.Keys(payload)) {
		for i := range payload[family] {
			script := &payload[family][i]
			if k.goesAsText(script) {
				result.left[family] = append(result.left[family], *script)
				continue
			}
			if err := w.add(family, script); err != nil {
				result.left[family] = append(result.left[family], *script)
				result.detour[family] = oneLine([]error{result.detour[family], err})
				continue
			}
			result.wrote[family] = append(result.wrote[family], script.Table)
		}
	}
	w.batch.Port = k.port
	return &directBatch{w, result}
}

// sendDirectly sends the batch of a payload, which the kernel takes only while its
// ruleset counter is genid. A rider, if there is one, goes with it.
//
// The direct path goes first: stale, it has written nothing, while a text
// path that has written cannot take that back. What the kernel refuses is left
// to iptables-restore, table by table, so that only the bad table fails, unless
// it names the rule that is the cause (see named). A refusal is stale if a set was
// destroyed or made again since its number was asked for: that moves no genid.
func (k *Kernel) sendDirectly(b *directBatch, payload Payload, genid uint32, rider *Rider) directResult {
	if b == nil {
		return directResult{left: payload}
	}
	if !b.writer.writes {
		result := b.result
		result.at = time.Now()
		return result
	}
	if !b.writer.sets.current() {
		b = k.encodeWith(payload, b.writer.taught)
		if !b.writer.writes {
			return b.result
		}
	}
	b.writer.batch.Guard(genid)
	if err := b.writer.send(rider, func(whole *nft.Batch) error { return k.send(&b.writer, whole) }); err != nil {
		if !b.writer.sets.current() {
			return directResult{err: nft.ErrStale}
		}
		result := k.notDirectly(err, payload)
		result.sent = b
		return result
	}
	result := b.result
	result.at, result.took = time.Now(), b.writer.batch.Took
	if now, err := b.writer.conn.Genid(); err != nil || now != genid {
		result.moved = 1 // what changes nothing does not move it
	}
	return result
}

// silentFrom is how many new rules make a transaction so large that it is sent while
// this Kernel does not listen: the notifications took a quarter of the time that a heal of
// 5,000 services took, and are more at once than a socket's buffer has room for.
const silentFrom = 512

// send sends the batch. What it writes is known, so a large one is written silently.
func (k *Kernel) send(w *directWriter, batch *nft.Batch) error {
	if k.mirror == nil || w.added < silentFrom {
		return batch.Send()
	}
	return k.mirror.raw.Silently(w.written, k.subscriptions.All(), batch.Send)
}

// notDirectly says what follows if the transaction was not taken.
func (k *Kernel) notDirectly(err error, payload Payload) directResult {
	message, _ := errors.AsType[*nft.RefusedError](err)
	switch {
	case errors.Is(err, nft.ErrStale):
		return directResult{err: nft.ErrStale}
	case k.cfg.Replay == ReplayDirect:
		refused := &RestoreError{Reason: ReasonOther, Program: "nf_tables", Stderr: err.Error()}
		if errors.Is(err, unix.ENOENT) {
			refused.Reason = ReasonMissingChain
		}
		return directResult{err: refused, refused: message}
	}
	result := directResult{refused: message, left: payload, detour: map[rules.Family]error{}}
	for family := range payload {
		result.detour[family] = err
	}
	return result
}

// directConn returns the connection of the direct path, nil if there is none.
func (k *Kernel) directConn() *nft.Conn {
	reader, ok := k.reader.(nftReader)
	if !ok || k.source == nil {
		return nil
	}
	return reader.conn
}
