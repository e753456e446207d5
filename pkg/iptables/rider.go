package iptables

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Rider is what another realm adds to a transaction of iptables' tables: the kernel takes all of
// it or none. Its messages stand before those of the tables: for each set that belongs to a rule
// the kernel walks all that the transaction did before (nft_set_trans_bind).
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
// message of the rider's, or does not say of which message it complains, the tables are sent once
// more without it. A refusal of the tables' own messages costs the rider its place, too: what
// becomes of the tables is decided without it.
func (w *directWriter) send(rider *Rider, send func(*nft.Batch) error) error {
	if rider != nil {
		part := w.batch.Part(0)
		answer := rider.Append(part)
		if answer == nil {
			whole := w.batch.Led(part)
			whole.Finish()
			answer = send(whole)
			w.batch.Took = whole.Took
		}
		rider.Sent(answer)
		var refused *nft.RefusedError
		ofTables := errors.As(answer, &refused) && refused.Message > 1 && refused.Message <= w.batch.Messages()
		if answer == nil || ofTables || errors.Is(answer, nft.ErrStale) {
			return answer
		}
	}
	w.batch.Finish()
	return send(w.batch)
}
