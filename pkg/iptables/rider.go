package iptables

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Rider is another realm's addition to a transaction of iptables' tables: the kernel accepts
// both or none. Its messages are in front of the tables' messages. For each set that belongs to
// a rule, the kernel walks all earlier messages of the transaction (nft_set_trans_bind).
type Rider struct {
	// Genid is the ruleset's counter at the read behind the messages. A transaction of another
	// genid is sent without them.
	Genid uint32
	// Append writes the messages. After an error none of them is sent.
	Append func(*nft.Batch) error
	// Sent is called with the kernel's answer: nil if it accepted the messages, nft.ErrStale, or
	// the reason why the transaction was sent without them. It is not called if no transaction
	// was sent with them.
	Sent func(error)
}

// send sends the encoded tables, with the rider if there is one. The tables are sent once more
// without the rider if the kernel refuses a message of the rider, or does not name the refused
// message. If the kernel refuses a message of the tables, the rider is dropped, too: the caller
// decides about the tables without it.
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
