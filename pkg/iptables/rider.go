package iptables

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Rider is what another realm adds to a transaction of iptables' tables: the kernel takes all of
// it or none. Its messages stand behind those of the tables.
type Rider struct {
	// Genid is the ruleset's counter at the read that the messages rest on. A transaction of
	// another genid goes without them.
	Genid uint32
	// Append writes the messages; after an error nothing of them is sent.
	Append func(*nft.Batch) error
	// Sent is called with the kernel's answer: nil if it took the messages, nft.ErrStale, or why
	// the transaction went without them. It is not called if none was sent with them.
	Sent func(error)
}

// send sends what is encoded, and the rider with it, if there is one. Where the kernel refuses a
// message of the rider's, or does not say of which message it complains, the transaction is sent
// once more without it. A refusal of the tables' own messages costs the rider its place, too: what
// becomes of the tables is decided without it.
func (w *directWriter) send(rider *Rider, send func() error) error {
	tables := w.batch.Mark()
	if rider == nil {
		w.batch.Finish()
		return send()
	}
	last := w.batch.Messages()
	answer := rider.Append(w.batch)
	if answer == nil {
		w.batch.Finish()
		answer = send()
		rider.Sent(answer)
		var refused *nft.RefusedError
		ofTables := errors.As(answer, &refused) && refused.Message > 1 && refused.Message <= last
		if answer == nil || ofTables || errors.Is(answer, nft.ErrStale) {
			return answer
		}
	} else {
		rider.Sent(answer)
	}
	w.batch.Cut(tables)
	w.batch.Finish()
	return send()
}
