package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// mostQuestions bounds one datagram. The kernel answers the whole datagram
	// before we can receive. An answer takes up to 4 KiB of the 208 KiB that a
	// socket has for unread messages.
	mostQuestions = 40
	// answerSize is room for one answer: a rule with a comment has 600 bytes.
	answerSize = 2 << 10
)

var (
	errUnanswered = errors.New("netlink left a question unanswered")
	errTooMany    = errors.New("too many questions for one datagram")
)

// A Question is one request to nf_tables, but no dump, with the check of its
// answer. Check may change its data, which is valid until it returns.
type Question struct {
	Ask, Want uint16
	Attrs     []byte
	Check     func(data []byte) error
}

// An Asker sends many questions at the price of two system calls: the first sends
// them all in one datagram, the second receives all answers. The library has
// neither. An Asker may be used concurrently.
type Asker struct {
	mu       sync.Mutex // one datagram and its answers at a time
	fd       int        // -1: opening it again failed
	sequence uint32
	out      []byte
	in       [mostQuestions]mmsghdr
	iovecs   [mostQuestions]unix.Iovec
	buffer   []byte // room for mostQuestions answers
}

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	length uint32
}

// OpenAsker opens a socket and room for the answers. Each reader of nf_tables opens one, for
// its probes.
func OpenAsker() (*Asker, error) {
	a := &Asker{buffer: make([]byte, mostQuestions*answerSize)}
	for i := range a.in {
		a.iovecs[i].Base = &a.buffer[i*answerSize]
		a.iovecs[i].SetLen(answerSize)
		a.in[i].header.Iov = &a.iovecs[i]
		a.in[i].header.SetIovlen(1)
	}
	return a, a.open()
}

func (a *Asker) open() (err error) {
	a.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	return Wrap("opening a netlink socket", err)
}

// Close closes the socket, unless opening it again had failed.
func (a *Asker) Close() error {
	if a.fd < 0 {
		return nil
	}
	return unix.Close(a.fd)
}

// Ask sends all questions, at most mostQuestions, and checks every answer, for a probe of
// the marks. The error is the first check's, or the kernel's errno for a question that it
// refuses. If an answer is missing or damaged, Ask opens another socket.
func (a *Asker) Ask(family tableid.Family, all []Question) error {
	if len(all) > mostQuestions {
		return errTooMany
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fd < 0 {
		if err := a.open(); err != nil {
			return err
		}
	}
	a.out = a.out[:0]
	for i, q := range all {
		a.write(family, q, a.sequence+uint32(i))
	}
	first := a.sequence
	a.sequence += uint32(len(all))
	err := unix.Sendto(a.fd, a.out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err != nil {
		return Wrap("asking for the marks", err)
	}
	result, err := a.receive(first, all)
	if err != nil {
		// Otherwise unread messages in the socket would be taken for later
		// answers.
		return errors.Join(err, unix.Close(a.fd), a.open())
	}
	return result
}

// write appends one request, with that sequence number, to a.out. Ask sends all of them as
// one datagram.
func (a *Asker) write(family tableid.Family, q Question, sequence uint32) {
	out := binary.NativeEndian.AppendUint32(a.out, uint32(unix.SizeofNlMsghdr+nfgenmsgLen+len(q.Attrs)))
	out = binary.NativeEndian.AppendUint16(out, uint16(nftType(q.Ask)))
	out = binary.NativeEndian.AppendUint16(out, unix.NLM_F_REQUEST)
	out = binary.NativeEndian.AppendUint32(out, sequence)
	out = append(out, 0, 0, 0, 0) // the port, which the kernel fills in
	out = append(out, uint8(family), unix.NFNETLINK_V0, 0, 0)
	a.out = append(out, q.Attrs...) // their length is a multiple of 4
}

// receive receives and checks all answers for Ask; first is the first question's number.
// They are in the socket already: the kernel answers within the sender's system call. result
// is the first refusal; err means that answers are missing or damaged.
func (a *Asker) receive(first uint32, all []Question) (result, err error) {
	for done := 0; done < len(all); {
		n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(a.fd), uintptr(unsafe.Pointer(&a.in[0])), uintptr(len(all)-done), 0, 0, 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			return nil, errUnanswered
		case errno != 0:
			return nil, Wrap("receiving answers about the marks", errno)
		}
		for i := range int(n) {
			if a.in[i].header.Flags&unix.MSG_TRUNC != 0 {
				return nil, errTruncated
			}
			refused, err := takeAnswer(a.buffer[i*answerSize:][:a.in[i].length], first+uint32(done), all[done])
			if err != nil {
				return nil, err
			}
			if result == nil {
				result = refused
			}
			done++
		}
	}
	return result, nil
}

// takeAnswer takes one datagram, the answer to q, for receive. result is the check's error
// or the kernel's errno. An err says that the kernel's message breaks the protocol.
func takeAnswer(b []byte, sequence uint32, q Question) (result, err error) {
	if len(b) < unix.SizeofNlMsghdr {
		return nil, errShort
	}
	size := int(binary.NativeEndian.Uint32(b))
	if size < unix.SizeofNlMsghdr || size > len(b) {
		return nil, errShort
	}
	kind, got, data := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:]), b[unix.SizeofNlMsghdr:size]
	switch {
	case got != sequence:
		return nil, fmt.Errorf("netlink answered request %d, not %d", got, sequence)
	case kind == uint16(nftType(q.Want)):
		return q.Check(data), nil
	case kind != unix.NLMSG_ERROR:
		return nil, fmt.Errorf("netlink answered with a message of type %#x, not %#x", kind, nftType(q.Want))
	case len(data) < 4:
		return nil, errShort
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(data))), nil
}

// AskGenid returns the question for the ruleset's counter, which Ask writes into to. A probe
// puts it before and behind its questions: equal counters prove that no commit happened
// between them.
func AskGenid(to *uint32) Question {
	return Question{Ask: unix.NFT_MSG_GETGEN, Want: unix.NFT_MSG_NEWGEN, Check: func(data []byte) error {
		commit, err := parseCommit(data)
		*to = commit.Genid
		return err
	}}
}
