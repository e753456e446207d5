package nft

import (
	"errors"
	"fmt"
	"syscall"
)

// Callers distinguish these errors.
var (
	// ErrStale: another process committed since the genid that guards a batch.
	// Nothing was written.
	ErrStale = errors.New("the tables changed after they were read")
	// ErrPermission: the kernel refuses, most likely because CAP_NET_ADMIN is
	// missing.
	ErrPermission = errors.New("the kernel refuses access to its tables (CAP_NET_ADMIN is needed)")
	// ErrOverflow: the kernel dropped commits that we read too slowly. Or another
	// process committed while we sent a large transaction and did not listen. The
	// subscription has ended: subscribe again, then look at everything.
	ErrOverflow = errors.New("commits to nf_tables were missed: the kernel dropped their notifications, or they came while canaryd wrote")
)

// ErrNone: the kernel has no nf_tables.
var ErrNone = errors.New("the kernel has no nf_tables (load the module nf_tables)")

// ErrInterrupted: another process committed during a dump, which may have left
// out rules or listed them twice.
var ErrInterrupted = errors.New("a commit interrupted the dump")

// ErrEnough is for callbacks of a dump: it breaks the dump off. After another
// error of a callback, the rest of the dump is received and dropped.
var ErrEnough = errors.New("the dump was broken off")

var errTruncated = errors.New("a netlink datagram is larger than the kernel makes one")

// ErrTooBig: the batch exceeds the socket's limit for one datagram, and we may
// not raise that limit. Raising it takes CAP_NET_ADMIN in the initial user
// namespace.
var ErrTooBig = errors.New("the transaction is larger than a netlink socket of ours may send")

// Wrap adds the failed action to err, and marks errors that mean missing privileges
// (ErrPermission) or a kernel without nf_tables (ErrNone). nil stays nil.
func Wrap(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%w: %s: %w", ErrPermission, doing, err)
	case errors.Is(err, syscall.EPROTONOSUPPORT), errors.Is(err, syscall.EAFNOSUPPORT):
		return fmt.Errorf("%w: %s: %w", ErrNone, doing, err)
	default:
		return fmt.Errorf("%s: %w", doing, err)
	}
}
