package iptables

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// KeeperTable is the name of a Keeper's tables, one in each family.
const KeeperTable = "canaryd-keeper"

// The reasons why a Keeper has no table, for callers that act on them.
var (
	// ErrKeeperTaken: another process owns a table of that name. That process may be a canaryd
	// that just ended; the kernel soon removes its table.
	ErrKeeperTaken = errors.New("another process has a table named " + KeeperTable)
	// ErrKeeperKernel: the kernel lacks a feature that a Keeper needs.
	ErrKeeperKernel = errors.New("the kernel cannot keep NAT and connection tracking in place")
)

// A Keeper keeps the kernel's NAT and connection tracking registered while rules are missing.
//
// The kernel translates the packets of an established connection by its conntrack entry and
// needs no rule for that. But with the last nat base chain of a family it unregisters NAT. With
// the last rule that uses conntrack it unregisters conntrack (nf_nat_unregister_fn and
// nf_ct_netns_put, Linux 6.18). From then on packets arrive untranslated at the node's own
// stack, which resets their connections. A Keeper has one table in each family. Its empty nat
// base chains, one for each hook, keep NAT. Its rule with `masq`, in a chain that nothing jumps
// to, keeps conntrack. No packet is ever changed by it.
//
// The table has an owner, the Keeper's socket (NFT_TABLE_F_OWNER, Linux 5.12). `nft flush
// ruleset` skips it, no other process can change it, and the kernel removes it with the socket.
//
// The zero value is ready for use. All methods may be called concurrently.
type Keeper struct {
	mu   sync.Mutex
	open bool
	fd   int
	// port is the address of the socket. The kernel names it as the owner, and as the sender of
	// the commits.
	port atomic.Uint32
}

// Keeper returns the Kernel's Keeper. Its commits count as the Kernel's own. Kernel.Close closes
// it.
func (k *Kernel) Keeper() *Keeper { return &k.keeper }

// Keep makes the family's table, or leaves an existing one. The daemon calls it while protected
// rules translate, and Release when none does. After an error the family has no table, unless
// the kernel could not even be queried.
func (k *Keeper) Keep(family rules.Family) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.dial(); err != nil {
		return err
	}
	err := k.send(keeperBatch(family))
	if err == nil {
		return nil
	}
	// The kernel answers EEXIST even if the table is canaryd's. After an error of the socket the
	// table may exist, too.
	if ours, asked := k.owns(family); asked == nil && ours {
		return nil
	}
	return err
}

// Release deletes the family's table, if canaryd has one. The daemon calls it when no protected
// rule translates any more.
func (k *Keeper) Release(family rules.Family) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.open {
		return nil
	}
	ours, err := k.owns(family)
	if err != nil || !ours {
		return err
	}
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_DELTABLE, 0, family)
	b.Text(unix.NFTA_TABLE_NAME, KeeperTable)
	b.End()
	b.Finish()
	return k.send(b)
}

// Close closes the socket, and the kernel removes its tables. The Keeper may be used again.
func (k *Keeper) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.open {
		return nil
	}
	k.open = false
	return unix.Close(k.fd)
}

// ownPort reports whether commits from that netlink address are the Keeper's.
func (k *Keeper) ownPort(port uint32) bool { return port != 0 && port == k.port.Load() }

// dialTries is the number of addresses that dial tries: one in a billion is taken by chance.
const dialTries = 4

// dial opens the socket, unless it is open; Keep calls it. k.mu must be held.
func (k *Keeper) dial() error {
	if k.open {
		return nil
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nft.Wrap("opening the keeper's netlink socket", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1) // see nft.Batch.send
	for range dialTries {
		port := nft.NewPort()
		if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}); err == nil {
			k.port.Store(port)
			k.fd, k.open = fd, true
			return nil
		}
	}
	return errors.Join(nft.Wrap("binding the keeper's netlink socket", err), unix.Close(fd))
}

// send sends one finished batch over the Keeper's own socket, which becomes the owner of the
// table; Keep and Release call it. k.mu must be held.
func (k *Keeper) send(b *nft.Batch) error {
	nft.ForgetComplaints(k.fd)
	if err := b.SendOver(k.fd); err != nil {
		return nft.Wrap("sending the keeper's transaction", err)
	}
	about, errno, err := nft.FirstComplaint(k.fd)
	if err != nil || errno == 0 {
		return err
	}
	return keeperRefused(about, errno)
}

// The numbers of the messages in a Keeper's batch that a complaint may be about.
const (
	aboutBatch = 1 // NFNL_MSG_BATCH_BEGIN
	aboutTable = 2
)

// keeperRefused returns the reason why the kernel refused a Keeper's batch, by the number of
// the message that it complained about. The daemon decides by ErrKeeperTaken and
// ErrKeeperKernel.
func keeperRefused(about uint32, errno syscall.Errno) error {
	switch {
	case about == aboutBatch && errno == unix.EOPNOTSUPP:
		return fmt.Errorf("%w: %w", ErrKeeperKernel, nft.ErrNone)
	case about == aboutBatch:
		return nft.Wrap("sending the keeper's transaction", errno)
	case errno == unix.EEXIST, errno == unix.EPERM:
		return fmt.Errorf("%w (%w)", ErrKeeperTaken, errno)
	case about == aboutTable && (errno == unix.EINVAL || errno == unix.EOPNOTSUPP):
		return fmt.Errorf("%w: its tables have no owner before Linux 5.12 (%w)", ErrKeeperKernel, errno)
	case errno == unix.ENOENT, errno == unix.EOPNOTSUPP:
		return fmt.Errorf("%w: it lacks nat chains or masquerading of nf_tables, modules nft_chain_nat and nft_masq (%w)", ErrKeeperKernel, errno)
	default:
		return fmt.Errorf("the kernel refused the table %s: %w", KeeperTable, errno)
	}
}

// owns queries the kernel whether the family's table exists and is canaryd's, for Keep and
// Release. It uses a separate socket, because the Keeper's own may still have an old complaint.
// k.mu must be held.
func (k *Keeper) owns(family rules.Family) (bool, error) {
	conn, err := nft.Dial()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	table, ok, err := conn.Table(family, KeeperTable)
	return ok && k.ownPort(table.Owner), err
}

// From linux/netfilter/nf_tables.h; golang.org/x/sys has no names for them.
const (
	nftTableFOwner    = 2
	nftaTableUserdata = 6
)

// keeperComment describes the table's purpose in the output of `nft list ruleset`.
const keeperComment = "made by canaryd, gone with it: keeps established connections through a flush"

// keeperBatch makes the family's table, in one transaction: an empty nat base chain for each hook,
// and a rule with masq that no packet meets (see Keeper).
//
// The priority of its base chains is one behind that of iptables' chains. Of the nat chains at
// one hook, the first that translates ends the walk, so a packet that iptables translates never
// reaches them. The kernel accepts no nat chain before conntrack's priority (-200).
func keeperBatch(family rules.Family) *nft.Batch {
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Excl, family)
	b.Text(unix.NFTA_TABLE_NAME, KeeperTable)
	b.Number(unix.NFTA_TABLE_FLAGS, nftTableFOwner)
	b.Blob(nftaTableUserdata, commentUserdata(keeperComment))
	b.End()
	for _, chain := range []string{"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"} {
		base := baseChainOf(rules.Nat, chain)
		keeperChain(b, family, chain)
		b.Pair(unix.NFTA_CHAIN_HOOK, base.hook, uint32(base.priority+1))
		b.Number(unix.NFTA_CHAIN_POLICY, nfAccept)
		b.Text(unix.NFTA_CHAIN_TYPE, base.kind)
		b.End()
	}
	keeperChain(b, family, keeperUnused)
	b.End()
	b.Begin(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, family)
	b.Text(unix.NFTA_RULE_TABLE, KeeperTable)
	b.Text(unix.NFTA_RULE_CHAIN, keeperUnused)
	masq := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "masq", 1)
	b.Blob(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nft.AppendAttr(nil, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, masq, 0))
	b.End()
	b.Finish()
	return b
}

// keeperUnused is the chain that nothing jumps to.
const keeperUnused = "unused"

// keeperChain begins a chain of a Keeper's table; keeperBatch adds its attributes and ends it.
func keeperChain(b *nft.Batch, family rules.Family, name string) {
	b.Begin(unix.NFT_MSG_NEWCHAIN, netlink.Create, family)
	b.Text(unix.NFTA_CHAIN_TABLE, KeeperTable)
	b.Text(unix.NFTA_CHAIN_NAME, name)
}

// commentUserdata encodes a comment as libnftnl does (NFTNL_UDATA_TABLE_COMMENT in its udata.h):
// type, length, and the text with a NUL at its end.
func commentUserdata(comment string) []byte {
	const tableComment = 0
	return append(append([]byte{tableComment, byte(len(comment) + 1)}, comment...), 0)
}
