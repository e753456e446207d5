package nft

import (
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTakeAnswer: takeAnswer refuses answers to other questions and malformed
// answers.
func TestTakeAnswer(t *testing.T) {
	refused := errors.New("checked")
	q := Question{Want: unix.NFT_MSG_NEWGEN, Check: func([]byte) error { return refused }}
	kind := uint16(nftType(unix.NFT_MSG_NEWGEN))
	errno := func(n int32) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(-n)) }
	whole := answer(kind, 0, 7, []byte("data"))
	for name, tc := range map[string]struct {
		datagram []byte
		result   error
		broken   bool
	}{
		"the answer":            {whole, refused, false},
		"refused":               {answer(unix.NLMSG_ERROR, 0, 7, errno(int32(unix.ENOENT))), unix.ENOENT, false},
		"refused without errno": {answer(unix.NLMSG_ERROR, 0, 7, nil), nil, true},
		"another's":             {answer(kind, 0, 8, nil), nil, true},
		"another kind":          {answer(kind+1, 0, 7, nil), nil, true},
		"nothing":               {nil, nil, true},
		"cut off":               {whole[:len(whole)-1], nil, true},
	} {
		result, err := takeAnswer(tc.datagram, 7, q)
		if !errors.Is(result, tc.result) || (err != nil) != tc.broken {
			t.Errorf("%s: %v and %v, want %v, broken %v", name, result, err, tc.result, tc.broken)
		}
	}
}
