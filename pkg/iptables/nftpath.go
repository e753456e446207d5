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

// A directResult is the result of a payload on the direct path.
type directResult struct {
	// err is ErrStale, or a *RestoreError if no other path may be used. Then nothing was
	// written.
	err error
	// moved is how far canaryd's commit moved the genid. at is the time of the commit, and took
	// is the time that the kernel took for it.
	moved uint32
	at    time.Time
	took  time.Duration
	wrote map[rules.Family][]rules.TableName
	// left is the part for iptables-restore, and detour the reasons.
	left   Payload
	detour map[rules.Family]error
	// refused is the kernel's answer, if it refused a message, and sent is the refused batch.
	refused *nft.RefusedError
	sent    *directBatch
}

// A directBatch is a payload as one unsent transaction, as far as it can be written directly. It
// has no end, because a rider may follow.
type directBatch struct {
	writer directWriter
	result directResult // the result if the kernel accepts it
}

// encode encodes the directly writable part of all families as one transaction. It returns nil
// if there is no direct path.
func (k *Kernel) encode(payload Payload) *directBatch { return k.encodeWith(payload, nil) }

// encodeWith is encode with bytes for rules that could not be written directly otherwise.
func (k *Kernel) encodeWith(payload Payload, known taught) *directBatch {
	return k.encodeSeeking(payload, known, 0)
}

// encodeSeeking is encodeWith that also finds the rule of a message, by its number in the
// batch, for named; 0 seeks none.
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

// sendDirectly sends the batch of a payload, which the kernel accepts only while its ruleset
// counter is genid. A rider, if there is one, is sent with it.
//
// The direct path is first, because a stale transaction writes nothing, and the text path cannot
// take back its writes. If the kernel refuses the batch, iptables-restore writes table by table,
// so that only the bad table fails. But if the kernel names the offending rule, that is the
// result (see named). A refusal counts as stale if a set was destroyed or made again since its
// number was read: that changes no genid.
func (k *Kernel) sendDirectly(b *directBatch, payload Payload, genid uint32, rider *Rider) directResult {
	if b == nil {
		return directResult{left: payload}
	}
	if b.writer.writes && !b.writer.sets.current() {
		b = k.encodeWith(payload, b.writer.taught)
	}
	if !b.writer.writes {
		result := b.result
		result.at = time.Now()
		return result
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
		result.moved = 1 // a transaction without changes does not move it
	}
	return result
}

// silentFrom is the number of new rules from which on a transaction is sent while this Kernel
// does not listen. The notifications took a quarter of the time of a heal with 5,000 services,
// and are too many at once for a socket's buffer.
const silentFrom = 512

// send sends the batch for sendDirectly. The Kernel knows its content, so it sends a large one
// silently.
func (k *Kernel) send(w *directWriter, batch *nft.Batch) error {
	if k.mirror == nil || w.added < silentFrom {
		return batch.Send()
	}
	return k.mirror.raw.Silently(w.written, k.subscriptions.All(), batch.Send)
}

// notDirectly returns the result of a transaction that failed with err: stale, refused, or
// (with ReplayAuto) left to iptables-restore. sendDirectly calls it.
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

// directConn returns the connection of the direct path, nil if there is none: on legacy. Then
// nothing is encoded.
func (k *Kernel) directConn() *nft.Conn {
	reader, ok := k.reader.(nftReader)
	if !ok {
		return nil
	}
	return reader.conn
}
