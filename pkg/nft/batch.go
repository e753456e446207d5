package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// batchChunk is the size of a batch's pieces. One growing slice would hold 40 MiB
// twice at each growth.
const batchChunk = 1 << 20

// maxBatch bounds a batch. 62,590 rules are 25 MiB, and the kernel copies a batch
// into memory that it cannot swap out.
const maxBatch = 256 << 20

// A Batch is one nf_tables transaction, in the form in which it is sent. It
// begins with NFNL_MSG_BATCH_BEGIN and ends with NFNL_MSG_BATCH_END. Each message
// has the sequence number of its place. linux/netfilter/nfnetlink.h and
// linux/netfilter/nf_tables.h define the format. Numbers in attributes are
// big-endian, numbers in headers have the machine's order.
type Batch struct {
	chunks [][]byte
	bytes  int // in all chunks
	count  uint32
	start  int // of the message being written, in the last chunk
	// Port is the netlink address to send from; 0: the kernel chooses one.
	Port uint32
	Took time.Duration // the kernel's part of Send
}

// NewPort returns a random netlink address that the kernel gives to no socket: it
// gives process numbers, which end at 2^22, and negative numbers
// (netlink_autobind).
func NewPort() uint32 { return 1<<30 | rand.Uint32N(1<<30) }

// A BatchMark is a place in a batch to which it can be cut back.
type BatchMark struct {
	chunks, last, bytes int
	count               uint32
}

// NoGuard is no genid: the counter skips it (nf_tables_commit).
const NoGuard = 0

// NewBatch begins a batch for a transaction of canaryd's. It has no guard: the kernel takes
// it at any genid, unless Guard sets one.
func NewBatch() *Batch {
	b := &Batch{chunks: [][]byte{nil}}
	b.edge(unix.NFNL_MSG_BATCH_BEGIN)
	b.Number(unix.NFNL_BATCH_GENID, NoGuard)
	b.End()
	return b
}

// Guard lets the kernel take the batch only while its ruleset counter is genid
// (nf_tables since Linux 4.12); otherwise the kernel answers ERESTART.
func (b *Batch) Guard(genid uint32) {
	first := b.chunks[0][:binary.NativeEndian.Uint32(b.chunks[0])]
	binary.BigEndian.PutUint32(first[len(first)-4:], genid) // its only attribute
}

// Finish ends the batch.
func (b *Batch) Finish() {
	b.edge(unix.NFNL_MSG_BATCH_END)
	b.End()
}

// edge begins the first or the last message of a batch. There nfgenmsg's last
// half-word names the subsystem, big-endian.
func (b *Batch) edge(message uint16) {
	b.header(netlink.HeaderType(message), netlink.Request, []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES})
}

// Begin begins a message of nf_tables. The caller adds its attributes and calls
// End.
func (b *Batch) Begin(message uint16, flags netlink.HeaderFlags, family tableid.Family) {
	b.header(nftType(message), netlink.Request|flags, []byte{uint8(family), unix.NFNETLINK_V0, 0, 0})
}

// header begins a message with number b.count; Begin and edge call it. gen is the struct
// nfgenmsg behind the netlink header. A chunk is full if an ordinary message may not fit. The
// chunk grows for a longer one.
func (b *Batch) header(kind netlink.HeaderType, flags netlink.HeaderFlags, gen []byte) {
	last := len(b.chunks) - 1
	if len(b.chunks[last]) > batchChunk-8<<10 {
		b.chunks = append(b.chunks, make([]byte, 0, batchChunk))
		last++
	}
	b.count++
	out := b.chunks[last]
	b.start = len(out)
	out = append(out, 0, 0, 0, 0) // the length, which End sets
	out = binary.NativeEndian.AppendUint16(out, uint16(kind))
	out = binary.NativeEndian.AppendUint16(out, uint16(flags))
	out = binary.NativeEndian.AppendUint32(out, b.count)
	out = append(out, 0, 0, 0, 0) // our port: the kernel knows it
	b.chunks[last] = append(out, gen...)
}

// End ends the message that Begin began, and sets its length.
func (b *Batch) End() {
	out := b.chunks[len(b.chunks)-1]
	binary.NativeEndian.PutUint32(out[b.start:], uint32(len(out)-b.start))
	b.bytes += len(out) - b.start
}

// Blob writes an attribute that is a series of bytes, or of attributes.
func (b *Batch) Blob(kind uint16, value []byte) {
	b.chunks[len(b.chunks)-1] = AppendAttr(b.chunks[len(b.chunks)-1], kind, value, 0)
}

// Text writes an attribute that is a string with a NUL at its end.
func (b *Batch) Text(kind uint16, value string) {
	b.chunks[len(b.chunks)-1] = AppendAttr(b.chunks[len(b.chunks)-1], kind, value, 1)
}

func (b *Batch) Number(kind uint16, value uint32) {
	b.Blob(kind, binary.BigEndian.AppendUint32(nil, value))
}

func (b *Batch) Number64(kind uint16, value uint64) {
	b.Blob(kind, binary.BigEndian.AppendUint64(nil, value))
}

// Pair writes an attribute that nests two numbers, of kind 1 and 2, such as the hook and the
// priority of a base chain.
func (b *Batch) Pair(kind uint16, one, two uint32) {
	nested := AppendAttr(nil, 1, binary.BigEndian.AppendUint32(nil, one), 0)
	nested = AppendAttr(nested, 2, binary.BigEndian.AppendUint32(nil, two), 0)
	b.Blob(kind|unix.NLA_F_NESTED, nested)
}

// Bytes returns the size of the batch so far.
func (b *Batch) Bytes() int { return b.bytes }

func (b *Batch) Mark() BatchMark {
	return BatchMark{len(b.chunks), len(b.chunks[len(b.chunks)-1]), b.bytes, b.count}
}

// Cut removes everything that was written since the mark. Callers do so if they could not
// write a table to its end.
func (b *Batch) Cut(m BatchMark) {
	clear(b.chunks[m.chunks:])
	b.chunks = b.chunks[:m.chunks]
	b.chunks[m.chunks-1] = b.chunks[m.chunks-1][:m.last]
	b.bytes, b.count = m.bytes, m.count
}

// Part returns a batch for Join. Its numbers leave room for ahead more messages.
// Several parts may be written at the same time.
func (b *Batch) Part(ahead uint32) *Batch {
	return &Batch{chunks: [][]byte{make([]byte, 0, batchChunk)}, count: b.count + ahead}
}

// Join adds the messages of another batch, a Part, whose numbers follow this batch's. So
// several goroutines may encode one large transaction.
func (b *Batch) Join(next *Batch) {
	b.chunks = append(b.chunks, next.chunks...)
	b.bytes += next.bytes
	b.count = next.count
}

// Led returns a batch that begins with the messages of a Part: a rider, which is written in
// the same transaction. b does not change, but shares memory with the result: send only one
// of them at a time.
func (b *Batch) Led(part *Batch) *Batch {
	first := b.chunks[0]
	begin := binary.NativeEndian.Uint32(first)
	led := &Batch{Port: b.Port, bytes: b.bytes + part.bytes, count: part.count}
	led.chunks = slices.Concat([][]byte{first[:begin:begin]}, part.chunks, [][]byte{first[begin:]}, b.chunks[1:])
	return led
}

// A RefusedError says that the kernel refused a transaction as a whole.
type RefusedError struct {
	Errno syscall.Errno
	What  string // the message of the kernel's complaint
	// Message is that message's number in the batch, from 1 on. Message 1 begins
	// the batch; the kernel complains of it if it refuses the whole batch.
	Message int
	// Messages are the numbers of all messages that the kernel complained of, in
	// their order. The kernel continues after a refused message, so it may refuse
	// later messages that depend on it. If there are some hundred complaints, the
	// last ones are lost.
	Messages []int
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the kernel refused %s: %v", e.What, e.Errno)
}

func (e *RefusedError) Unwrap() error { return e.Errno }

// Send sends the finished batch as one datagram. It returns ErrStale, a
// *RefusedError or another reason why nothing was written. The kernel handles a
// batch before sendmsg returns (nfnetlink_rcv_batch). By then all its complaints
// are in the socket's queue, so an empty queue is success, and nothing here
// waits. Send requests no acknowledgements: one per message would overflow any
// buffer, and kernels before 6.10 send none for the batch's end.
func (b *Batch) Send() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return Wrap("opening a netlink socket for a transaction", err)
	}
	defer unix.Close(fd)
	// Complaints contain no copy of the message (Linux 4.3). An older kernel
	// sends longer ones, which do no harm.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	if b.Port != 0 {
		// If another socket has the address after all, the kernel chooses
		// another. Then the commit looks like another process's, which harms only
		// the flush record.
		_ = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: b.Port})
	}
	return b.SendFrom(fd)
}

// SendFrom is Send over the caller's netlink socket, whose queue must be empty:
// see ForgetComplaints.
func (b *Batch) SendFrom(fd int) error {
	if err := b.makeRoom(fd); err != nil {
		return err
	}
	to := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	start := time.Now()
	_, err := unix.SendmsgBuffers(fd, b.chunks, nil, to, 0)
	b.Took = time.Since(start)
	if errors.Is(err, unix.EMSGSIZE) {
		return ErrTooBig
	} else if err != nil {
		return Wrap("sending a transaction", err)
	}
	return b.complaint(fd)
}

// Wire returns a copy of the batch as it is sent.
func (b *Batch) Wire() []byte { return slices.Concat(b.chunks...) }

// SendOver sends the finished batch over the caller's socket. The caller reads
// the result with FirstComplaint. SendOver is for small batches.
func (b *Batch) SendOver(fd int) error {
	_, err := unix.SendmsgBuffers(fd, b.chunks, nil, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}, 0)
	return err
}

// makeRoom raises the socket's send buffer to the size of the batch, because netlink refuses
// a larger datagram (netlink_sendmsg). SendFrom calls it; its error means that nothing was
// sent. The kernel doubles the value that it is given.
func (b *Batch) makeRoom(fd int) error {
	if b.bytes > maxBatch {
		return ErrTooBig
	}
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, b.bytes)
	if errors.Is(err, unix.EPERM) {
		// The limit is net.core.wmem_max; sendmsg says if that is too little.
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, b.bytes)
	}
	if err != nil {
		return fmt.Errorf("raising a netlink socket's send buffer: %w", err)
	}
	return nil
}

// complaint returns the kernel's complaint about the batch that SendFrom sent: ErrStale, a
// *RefusedError or another error. nil means that the batch was committed.
func (b *Batch) complaint(fd int) error {
	about, errno, err := FirstComplaint(fd)
	switch {
	case err != nil:
		return err
	case errno == unix.ERESTART:
		return ErrStale
	case errno == unix.EPERM:
		return Wrap("sending a transaction", errno)
	case errno != 0:
		refused := &RefusedError{errno, b.describe(about), int(about), []int{int(about)}}
		for err == nil {
			var more uint32
			if more, errno, err = FirstComplaint(fd); err != nil || errno == 0 {
				break
			}
			refused.Messages = append(refused.Messages, int(more))
		}
		return refused
	default:
		return nil
	}
}

// FirstComplaint returns the first error in the socket's queue, and the number of the
// refused message; errno is 0 if there is none. err means that the queue could not be read.
// complaint and Keeper.send call it.
func FirstComplaint(fd int) (about uint32, errno syscall.Errno, err error) {
	buf := make([]byte, 8<<10) // header, errno and, from old kernels, a copy
	var lost error
	for {
		n, _, flags, _, err := unix.Recvmsg(fd, buf, nil, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS):
			// The kernel dropped the last of many complaints; the first one is in
			// the queue.
			lost = err
			continue
		case errors.Is(err, unix.EAGAIN):
			return 0, 0, Wrap("reading the result of a transaction", lost)
		case err != nil:
			return 0, 0, Wrap("reading the result of a transaction", err)
		}
		about, errno, err := parseComplaint(buf[:n])
		switch {
		case err != nil && flags&unix.MSG_TRUNC == 0:
			return 0, 0, err
		case err != nil:
			return 0, 0, fmt.Errorf("%w (it was cut off)", err)
		case errno != 0:
			return about, errno, nil
		}
	}
}

// ForgetComplaints empties a socket's queue, which may hold many complaints about a refused
// batch. Keeper and Standby, which keep a socket, call it before they send the next batch.
func ForgetComplaints(fd int) {
	var buf [1]byte
	for {
		_, _, err := unix.Recvfrom(fd, buf[:], unix.MSG_DONTWAIT)
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
			return
		}
	}
}

// parseComplaint reads NLMSG_ERROR (struct nlmsgerr after the header). It returns the
// refused message's sequence number and the error, 0 for an acknowledgement. err means that
// the message is unreadable. FirstComplaint calls it.
func parseComplaint(data []byte) (about uint32, errno syscall.Errno, err error) {
	if len(data) < unix.SizeofNlMsghdr+4 {
		return 0, 0, errShort
	}
	if kind := binary.NativeEndian.Uint16(data[4:]); kind != unix.NLMSG_ERROR {
		return 0, 0, fmt.Errorf("the kernel answered a transaction with message %#x", kind)
	}
	code := int32(binary.NativeEndian.Uint32(data[unix.SizeofNlMsghdr:]))
	if code > 0 || code < -4095 { // MAX_ERRNO in linux/err.h
		return 0, 0, fmt.Errorf("the kernel answered a transaction with error %d", code)
	}
	return binary.NativeEndian.Uint32(data[8:]), syscall.Errno(-code), nil
}

// describe names the message with this sequence number, for people (RefusedError.What).
func (b *Batch) describe(about uint32) string {
	if message := b.Message(int(about)); message != nil {
		return describeMessage(binary.NativeEndian.Uint16(message[4:]), message[unix.SizeofNlMsghdr:])
	}
	return "a transaction"
}

// Message returns the message with this number, including its header; nil if there is none.
// It shows which message a RefusedError means.
func (b *Batch) Message(number int) []byte {
	for _, chunk := range b.chunks {
		for len(chunk) >= unix.SizeofNlMsghdr {
			size := binary.NativeEndian.Uint32(chunk)
			if binary.NativeEndian.Uint32(chunk[8:]) == uint32(number) {
				return chunk[:size:size]
			}
			chunk = chunk[size:]
		}
	}
	return nil
}

// describeMessage names the object of a message for people, such as a rule of a chain. kind
// is its netlink type, data the rest from struct nfgenmsg on.
func describeMessage(kind uint16, data []byte) string {
	family := tableid.Family(data[0])
	switch netlink.HeaderType(kind) {
	case nftType(unix.NFT_MSG_NEWCHAIN), nftType(unix.NFT_MSG_DELCHAIN):
		if c, err := ParseChain(data); err == nil {
			return fmt.Sprintf("chain %s of %s %s", c.Name, family, c.Table)
		}
	case nftType(unix.NFT_MSG_NEWRULE), nftType(unix.NFT_MSG_DELRULE):
		if r, err := ParseRule(data); err == nil {
			return fmt.Sprintf("a rule of chain %s of %s %s", r.Chain, family, r.Table)
		}
	}
	return describeObject(ObjectKind(kind&0xff), family, data[nfgenmsgLen:])
}
