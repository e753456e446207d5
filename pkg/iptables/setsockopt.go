package iptables

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// This file reads names and numbers of ipsets as iptables does, by getsockopt(2). Kernels before
// 4.20 answer nothing else. Any IPv4 socket is suitable.

const (
	setOption          = 83 // SO_IP_SET
	setOptionByName    = 6  // IP_SET_OP_GET_BYNAME
	setOptionByIndex   = 7  // IP_SET_OP_GET_BYINDEX
	setOptionProtocol  = 6  // every version of the kernel accepts it
	setOptionContentAt = 8  // struct ip_set_req_get_set: the operation, the version, a name or a number
)

// askSetOption sends one question (IP_SET_OP_GET_*) about a set. content has the name or number
// behind the question's head, and is overwritten by the answer.
func askSetOption(operation uint32, content []byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written
	buf := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, operation), setOptionProtocol)
	buf = append(buf, content...)
	if n, err := getsockopt(fd, unix.IPPROTO_IP, setOption, buf); err != nil || n != len(buf) {
		return fmt.Errorf("asking ipset, which answered with %d bytes: %w", n, err)
	}
	copy(content, buf[setOptionContentAt:])
	return nil
}

// setNameByOption returns the name of the set of that number, or ErrNoSet. setNumbers.name
// calls it if netlink gave no answer.
func setNameByOption(number uint16) (string, error) {
	content := make([]byte, maxSetName+1)
	binary.NativeEndian.PutUint16(content, number)
	if err := askSetOption(setOptionByIndex, content); err != nil {
		return "", err
	}
	name := nft.String(content)
	if name == "" {
		return "", ErrNoSet
	}
	return name, nil
}

// setNumberByOption returns the number of the set of that name, or ErrNoSet. setNumbers.number
// calls it if netlink gave no answer.
func setNumberByOption(name string) (uint16, error) {
	content := make([]byte, maxSetName+1)
	copy(content, name)
	if err := askSetOption(setOptionByName, content); err != nil {
		return 0, err
	}
	number := binary.NativeEndian.Uint16(content)
	if number == noSetNumber {
		return 0, ErrNoSet
	}
	return number, nil
}
