package conntrack_test

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
)

// A message of a dump: struct nfgenmsg, and the two tuples of a UDP flow from
// 192.0.2.1:4000 to 10.96.0.10:53 (little-endian machine).
var udpFlow = []byte("\x02\x00\x00\x00" +
	"\x34\x00\x01\x80\x14\x00\x01\x80\x08\x00\x01\x00\xc0\x00\x02\x01\x08\x00\x02\x00\x0a\x60\x00\x0a" +
	"\x1c\x00\x02\x80\x05\x00\x01\x00\x11\x00\x00\x00\x06\x00\x02\x00\x0f\xa0\x00\x00\x06\x00\x03\x00\x00\x35\x00\x00" +
	"\x34\x00\x02\x80\x14\x00\x01\x80\x08\x00\x01\x00\x0a\x60\x00\x0a\x08\x00\x02\x00\xc0\x00\x02\x01" +
	"\x1c\x00\x02\x80\x05\x00\x01\x00\x11\x00\x00\x00\x06\x00\x02\x00\x00\x35\x00\x00\x06\x00\x03\x00\x0f\xa0\x00\x00")

// attribute is one attribute of a message, less than 256 bytes long.
func attribute(kind byte, value ...byte) []byte {
	return append([]byte{byte(4 + len(value)), 0, kind, 0}, value...)
}

func status(bits byte) []byte { return attribute(3, 0, 0, 0, bits) }

// tcpFlow is udpFlow of another protocol, in a state of TCP.
func tcpFlow(state byte) []byte {
	message := bytes.ReplaceAll(udpFlow, []byte("\x05\x00\x01\x00\x11"), []byte("\x05\x00\x01\x00\x06"))
	inner := append(attribute(1, state), 0, 0, 0)
	return append(message, attribute(4, attribute(1, inner...)...)...)
}

func TestParseEntry(t *testing.T) {
	began := attribute(20, attribute(1, 0x17, 0x97, 0x9c, 0xfe, 0x36, 0x2a, 0, 0)...)
	flow := nat.Flow{Protocol: nat.UDP, Source: netip.MustParseAddrPort("192.0.2.1:4000"), Destination: netip.MustParseAddrPort("10.96.0.10:53")}
	tcp := flow
	tcp.Protocol = nat.TCP
	type parsed = conntrack.Parsed
	for _, test := range []struct {
		story   string
		message []byte
		want    parsed
		ok      bool
	}{
		{"no status: it may have seen an answer", udpFlow, parsed{Flow: flow}, true},
		{"confirmed, and nat was asked", slices.Concat(udpFlow, status(0x08|0x80|0x40)), parsed{Flow: flow, Silent: true}, true},
		{"it has seen an answer", slices.Concat(udpFlow, status(0x08|0x02)), parsed{Flow: flow}, true},
		{"it is assured", slices.Concat(udpFlow, status(0x08|0x04)), parsed{Flow: flow}, true},
		{"its destination was translated, if to the same one", slices.Concat(udpFlow, status(0x08|0x20)), parsed{Flow: flow, Translated: true, Silent: true}, true},
		{"its source was", slices.Concat(udpFlow, status(0x08|0x10)), parsed{Flow: flow, Masqueraded: true, Silent: true}, true},
		{"the kernel noted when it began", slices.Concat(udpFlow, status(0x08), began), parsed{Flow: flow, Silent: true, Started: true}, true},
		{"a SYN", slices.Concat(tcpFlow(1), status(0x08)), parsed{Flow: tcp, Silent: true}, true},
		{"a SYN with ACK", slices.Concat(tcpFlow(2), status(0x08)), parsed{Flow: tcp}, true},
		{"SYNs from both sides", slices.Concat(tcpFlow(9), status(0x08)), parsed{Flow: tcp}, true},
		{"a SYN and no status", tcpFlow(1), parsed{Flow: tcp}, true},
		{"a zone of its own", slices.Concat(udpFlow, status(0x08), attribute(18, 0, 7)), parsed{}, false},
		{"cut off in the second tuple", udpFlow[:70], parsed{}, false},
		{"no tuples", udpFlow[:4], parsed{}, false},
		{"nothing", nil, parsed{}, false},
	} {
		got, _, ok := conntrack.ParseEntry(test.message)
		test.want.Backend = test.want.Flow.Destination
		if ok != test.ok {
			t.Errorf("%s: a flow %t, want %t", test.story, ok, test.ok)
		}
		if diff := cmp.Diff(test.want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); ok && diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.story, diff)
		}
	}
}

// The attributes that parseEntry keeps name the flow to the kernel, so they must
// be the message's own bytes. A flow that may have seen an answer is never
// silent.
func FuzzParseEntry(f *testing.F) {
	f.Add(udpFlow)
	f.Add(udpFlow[:50])
	f.Add(slices.Concat(udpFlow, status(0x0a)))
	f.Add(slices.Concat(tcpFlow(1), status(0x08)))
	f.Add(slices.Concat(tcpFlow(2), status(0x0a)))
	f.Fuzz(func(t *testing.T, message []byte) {
		p, attributes, ok := conntrack.ParseEntry(message)
		if ok && !bytes.Equal(attributes, message[4:]) {
			t.Errorf("kept %x of %x", attributes, message)
		}
		if answered, _, ok := conntrack.ParseEntry(append(bytes.Clone(message), status(0x0a)...)); ok && p.Flow != answered.Flow {
			t.Errorf("what follows makes another flow of %x", message)
		} else if ok && len(attributes)%4 == 0 && wellFormed(attributes) && answered.Silent {
			t.Errorf("a flow with an answer is silent: %x", message)
		}
	})
}

// Any data from a socket: reading it must end, and must not pass the data's end.
func FuzzMessages(f *testing.F) {
	f.Add([]byte("\x14\x00\x00\x00\x03\x00\x02\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Add([]byte("\x00\x00\x00\x00\x03\x00\x02\x00\x01\x00\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if n := conntrack.MessageBytes(data); n > len(data) {
			t.Errorf("%d bytes of messages in %d", n, len(data))
		}
	})
}

// wellFormed reports whether attributes fill all of data, so that an attribute
// after them is read.
func wellFormed(data []byte) bool {
	return nft.EachAttr(data, func(uint16, []byte) error { return nil }) == nil
}
