package conntrack_test

import (
	"bytes"
	"testing"

	"github.com/canaryd/canaryd/pkg/conntrack"
)

// A message of a dump: struct nfgenmsg, and the two tuples of a UDP flow from
// 192.0.2.1:4000 to 10.96.0.10:53 (little-endian machine).
var udpFlow = []byte("\x02\x00\x00\x00" +
	"\x34\x00\x01\x80\x14\x00\x01\x80\x08\x00\x01\x00\xc0\x00\x02\x01\x08\x00\x02\x00\x0a\x60\x00\x0a" +
	"\x1c\x00\x02\x80\x05\x00\x01\x00\x11\x00\x00\x00\x06\x00\x02\x00\x0f\xa0\x00\x00\x06\x00\x03\x00\x00\x35\x00\x00" +
	"\x34\x00\x02\x80\x14\x00\x01\x80\x08\x00\x01\x00\x0a\x60\x00\x0a\x08\x00\x02\x00\xc0\x00\x02\x01" +
	"\x1c\x00\x02\x80\x05\x00\x01\x00\x11\x00\x00\x00\x06\x00\x02\x00\x00\x35\x00\x00\x06\x00\x03\x00\x0f\xa0\x00\x00")

func TestParseEntry(t *testing.T) {
	status := func(bits byte) []byte { return []byte{8, 0, 3, 0, 0, 0, 0, bits} }
	for _, test := range []struct {
		story          string
		message        []byte
		translated, ok bool
	}{
		{"no status", udpFlow, false, true},
		{"confirmed, and nat was asked", append(bytes.Clone(udpFlow), status(0x08|0x40)...), false, true},
		{"its destination was translated, if to the same one", append(bytes.Clone(udpFlow), status(0x08|0x20)...), true, true},
		{"cut off in the second tuple", udpFlow[:70], false, false},
		{"no tuples", udpFlow[:4], false, false},
		{"nothing", nil, false, false},
	} {
		if _, translated, ok := conntrack.ParseEntry(test.message); ok != test.ok || ok && translated != test.translated {
			t.Errorf("%s: translated %t, a flow %t, want %t %t", test.story, translated, ok, test.translated, test.ok)
		}
	}
}

// What is kept of a message names the flow to the kernel: it is the message's
// own bytes, whatever they are.
func FuzzParseEntry(f *testing.F) {
	f.Add(udpFlow)
	f.Add(udpFlow[:50])
	f.Fuzz(func(t *testing.T, message []byte) {
		if attributes, _, ok := conntrack.ParseEntry(message); ok && !bytes.Equal(attributes, message[4:]) {
			t.Errorf("kept %x of %x", attributes, message)
		}
	})
}
