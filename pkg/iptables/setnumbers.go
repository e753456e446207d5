package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A setNamer returns the name of the ipset with a number.
type setNamer interface {
	name(number uint16) (string, error)
}

// A setIndex translates between names of ipsets and the kernel's numbers for them. The errors
// wrap ErrNoSet if the set does not exist. It may be used concurrently.
type setIndex interface {
	setNamer
	number(name string) (uint16, error)
}

// Constants of ipset's protocol (linux/netfilter/ipset/ip_set.h). Version 7 and the questions
// for names and numbers exist since Linux 4.20; for older kernels see setsockopt.go.
const (
	setSubsystem    = 6 << 8 // NFNL_SUBSYS_IPSET
	setList         = 7      // IPSET_CMD_LIST
	setGetByName    = 14     // IPSET_CMD_GET_BYNAME
	setGetByIndex   = 15     // IPSET_CMD_GET_BYINDEX
	setAttrProtocol = 1      // IPSET_ATTR_PROTOCOL
	setAttrName     = 2      // IPSET_ATTR_SETNAME
	setAttrFlags    = 6      // IPSET_ATTR_FLAGS
	setAttrIndex    = 11     // IPSET_ATTR_INDEX
	setProtocol     = 7      // IPSET_PROTOCOL
	setListNames    = 1 << 1 // IPSET_FLAG_LIST_SETNAME
	// noSetNumber is IPSET_INVALID_ID. A target SET has it in place of a set that it does not
	// name.
	noSetNumber = 0xffff
	// setPatience bounds the wait for an answer: a command of another process delays all others.
	setPatience = 10 * time.Second
)

// setNumbers queries the kernel. The zero value opens its socket with the first question.
type setNumbers struct {
	mu   sync.Mutex
	conn *netlink.Conn
}

var errSetAnswer = errors.New("ipset's answer cannot be read")

// name returns the name of the set of that number, for nameSets. The question fails on kernels
// before Linux 4.20: then it uses getsockopt. The error is ErrNoSet if there is no such set.
func (s *setNumbers) name(number uint16) (string, error) {
	value, err := s.ask(setGetByIndex, setAttrIndex|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint16(nil, number), setAttrName)
	if err != nil && !errors.Is(err, ErrNoSet) {
		if name, older := setNameByOption(number); older == nil {
			return name, nil
		}
	}
	if err != nil {
		return "", fmt.Errorf("asking for ipset number %d: %w", number, err)
	}
	name := nft.String(value)
	if name == "" || len(name) > maxSetName {
		return "", fmt.Errorf("asking for ipset number %d: %w", number, errSetAnswer)
	}
	return name, nil
}

// number returns the number of the set of that name, for usedNumbers. Like name, it falls back
// to getsockopt. The error is ErrNoSet if there is no such set.
func (s *setNumbers) number(name string) (uint16, error) {
	if name == "" || len(name) > maxSetName {
		return 0, fmt.Errorf("%w: no ipset can have the name %q", ErrNoSet, name)
	}
	value, err := s.ask(setGetByName, setAttrName, append([]byte(name), 0), setAttrIndex)
	if err == nil && (len(value) != 2 || binary.BigEndian.Uint16(value) == noSetNumber) {
		err = errSetAnswer
	}
	if err != nil && !errors.Is(err, ErrNoSet) {
		if number, older := setNumberByOption(name); older == nil {
			return number, nil
		}
	}
	if err != nil {
		return 0, fmt.Errorf("asking for ipset %q: %w", name, err)
	}
	return binary.BigEndian.Uint16(value), nil
}

// names returns the names of all sets, for Sets.Names.
func (s *setNumbers) names() ([]string, error) {
	flags := nft.AppendAttr(setRequest(), setAttrFlags|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint32(nil, setListNames), 0)
	answers, err := s.execute(setList, netlink.Request|netlink.Dump, flags)
	if err != nil {
		return nil, fmt.Errorf("listing the ipsets: %w", err)
	}
	var names []string
	for _, m := range answers {
		if name := nft.String(nft.AttrPath(m.Data[min(nfgenmsg, len(m.Data)):], setAttrName)); name != "" {
			names = append(names, name)
		}
	}
	return names, nil
}

// ask sends one question and returns the attribute wanted of the answer, for name and number.
// command is the question; attr and value say which set. The error is ErrNoSet if there is
// none.
func (s *setNumbers) ask(command int, attr uint16, value []byte, wanted uint16) ([]byte, error) {
	// The kernel acknowledges only on request, but always reports an error.
	answers, err := s.execute(command, netlink.Request, nft.AppendAttr(setRequest(), attr, value, 0))
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, ErrNoSet
	case err != nil:
		return nil, err
	case len(answers) != 1 || len(answers[0].Data) < nfgenmsg:
		return nil, errSetAnswer
	}
	return nft.AttrPath(answers[0].Data[nfgenmsg:], wanted), nil
}

// setRequest returns the common beginning of all questions: struct nfgenmsg and the protocol.
func setRequest() []byte {
	return nft.AppendAttr([]byte{unix.AF_INET, 0, 0, 0}, setAttrProtocol, []byte{setProtocol}, 0)
}

// execute sends one command to the kernel's ipset and returns its answers, for ask and names.
// The error wraps unix.ENOENT if there is no such set. After any other error it opens another
// socket for the next command.
func (s *setNumbers) execute(command int, flags netlink.HeaderFlags, data []byte) (answers []netlink.Message, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		if s.conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
			return nil, err
		}
	}
	if err = s.conn.SetDeadline(time.Now().Add(setPatience)); err == nil {
		answers, err = s.conn.Execute(netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(setSubsystem | command), Flags: flags}, Data: data})
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		// A late answer must not count as the answer to the next question.
		_ = s.conn.Close()
		s.conn = nil
	}
	return answers, err
}

// close closes the socket, if one is open. The next question opens another.
func (s *setNumbers) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return nil
	}
	err := s.conn.Close()
	s.conn = nil
	return err
}

// usedNumbers are the numbers of the sets in a batch.
type usedNumbers struct {
	index setIndex
	mu    sync.Mutex
	used  map[string]uint16
}

// number returns the number of a set for a rule in the batch (writeRule). It reads the number
// once, and notes it for current. Several goroutines call it.
func (u *usedNumbers) number(name string) (uint16, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if n, known := u.used[name]; known {
		return n, nil
	}
	n, err := u.index.number(name)
	if err == nil {
		if u.used == nil {
			u.used = map[string]uint16{}
		}
		u.used[name] = n
	}
	return n, err
}

// current reports whether all sets still have the used numbers. If not, sendDirectly encodes
// again, or takes a refusal for stale. A batch may wait for a flusher for seconds, and a set
// that is made again meanwhile moves no genid.
func (u *usedNumbers) current() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	for name, used := range u.used {
		if now, err := u.index.number(name); err != nil || now != used {
			return false
		}
	}
	return true
}
