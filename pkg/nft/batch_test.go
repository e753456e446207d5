package nft

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// After a cut a batch is as if the rest had never been written, also across
// chunks.
func TestABatchIsCutBack(t *testing.T) {
	fill := func(b *Batch, n int) {
		for range n {
			b.Begin(unix.NFT_MSG_NEWRULE, 0, tableid.IPv6)
			b.Blob(unix.NFTA_RULE_EXPRESSIONS, make([]byte, 60_000))
			b.End()
		}
	}
	for _, n := range []int{1, 15, 16, 17, 18, 40} {
		a, b := guardedBatch(7), guardedBatch(7)
		fill(a, n)
		fill(b, n)
		mark := b.Mark()
		fill(b, 33)
		b.Cut(mark)
		fill(a, 20)
		fill(b, 20)
		a.Finish()
		b.Finish()
		if !bytes.Equal(bytes.Join(a.chunks, nil), bytes.Join(b.chunks, nil)) || a.bytes != b.bytes {
			t.Errorf("behind %d messages: not the same batch", n)
		}
		if got := b.Wire(); b.bytes != len(got) {
			t.Errorf("the batch counts %d bytes and has %d", b.bytes, len(got))
		}
		for _, chunk := range b.chunks {
			if len(chunk) > batchChunk+128<<10 { // the last message may be as long as an attribute
				t.Errorf("a chunk of %d bytes", len(chunk))
			}
		}
	}
}

// complaintBytes is the kernel's complaint about message 2 of a batch.
func complaintBytes(code int32) []byte {
	m := binary.NativeEndian.AppendUint32(nil, 36)
	m = binary.NativeEndian.AppendUint16(m, unix.NLMSG_ERROR)
	m = binary.NativeEndian.AppendUint16(m, 0x100) // NLM_F_CAPPED
	m = binary.NativeEndian.AppendUint32(m, 2)
	m = binary.NativeEndian.AppendUint32(m, 4711)
	m = binary.NativeEndian.AppendUint32(m, uint32(code))
	return append(m, make([]byte, 16)...)
}

func TestParseComplaint(t *testing.T) {
	for _, test := range []struct {
		name  string
		data  []byte
		errno unix.Errno
		bad   bool
	}{
		{"ERESTART", complaintBytes(-85), unix.ERESTART, false},
		{"ENOENT", complaintBytes(-2), unix.ENOENT, false},
		{"an acknowledgement", complaintBytes(0), 0, false},
		{"no error of Linux's", complaintBytes(-5000), 0, true},
		{"not negative", complaintBytes(2), 0, true},
		{"cut off", complaintBytes(-2)[:18], 0, true},
		{"a notification", append([]byte{20, 0, 0, 0, 0x06, 0x0a}, make([]byte, 14)...), 0, true},
		{"nothing", nil, 0, true},
	} {
		about, errno, err := parseComplaint(test.data)
		if errno != test.errno || (err != nil) != test.bad || !test.bad && about != 2 {
			t.Errorf("%s: message %d, %v, %v", test.name, about, errno, err)
		}
	}
}

func FuzzComplaint(f *testing.F) {
	b := guardedBatch(1)
	b.Begin(unix.NFT_MSG_NEWRULE, 0, tableid.IPv6)
	b.Text(unix.NFTA_RULE_TABLE, "nat")
	b.Text(unix.NFTA_RULE_CHAIN, "X")
	b.End()
	b.Finish()
	f.Add(complaintBytes(-2))
	f.Add(complaintBytes(-5000))
	f.Fuzz(func(t *testing.T, data []byte) {
		about, errno, err := parseComplaint(data)
		switch what := b.describe(about); {
		case err != nil && errno != 0:
			t.Errorf("an error and an errno: %v, %v", err, errno)
		case (about == 2) != (what == "a rule of chain X of ipv6 nat"):
			t.Errorf("message %d is %s", about, what)
		}
	})
}

// guardedBatch begins a batch for that genid.
func guardedBatch(genid uint32) *Batch {
	b := NewBatch()
	b.Guard(genid)
	return b
}

// TestLed: the part's messages follow the beginning and precede all others, also
// over several chunks. The batch itself does not change.
func TestLed(t *testing.T) {
	b := NewBatch()
	table := func(b *Batch, name string) {
		b.Begin(unix.NFT_MSG_NEWTABLE, netlink.Create, tableid.IPv4)
		b.Text(unix.NFTA_TABLE_NAME, name)
		b.End()
	}
	for _, name := range []string{"b1", "b2"} {
		table(b, name)
	}
	b.Guard(7)
	part := b.Part(0)
	table(part, "first")
	for range 30_000 { // more than a chunk
		table(part, "and so on")
	}
	led := b.Led(part)
	led.Finish()
	order := func(b *Batch) (names []string, numbers map[uint32]bool) {
		numbers = map[uint32]bool{}
		wire := b.Wire()
		if len(wire) != b.bytes {
			t.Errorf("%d bytes, counted are %d", len(wire), b.bytes)
		}
		for len(wire) > 0 {
			size := binary.NativeEndian.Uint32(wire)
			names = append(names, String(AttrPath(wire[unix.SizeofNlMsghdr+4:size], unix.NFTA_TABLE_NAME)))
			numbers[binary.NativeEndian.Uint32(wire[8:])] = true
			wire = wire[size:]
		}
		return names, numbers
	}
	names, numbers := order(led)
	if len(names) != 30_005 || len(numbers) != len(names) {
		t.Fatalf("%d messages with %d numbers", len(names), len(numbers))
	}
	if names[1] != "first" || names[30_002] != "b1" || names[30_003] != "b2" {
		t.Errorf("they begin with %q and end with %q", names[:3], names[30_001:])
	}
	b.Finish()
	if names, _ := order(b); len(names) != 4 || names[1] != "b1" {
		t.Errorf("the batch itself has %q", names)
	}
}
