package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Verdict has the delay from a flush until canaryd noticed it, by its own flush records.
type Verdict struct {
	// Counted is the moment from which Delay counts.
	Counted string `json:"counted"`
	Delay   Spread `json:"delayMicroseconds"`
	// WithFlush counts from the beginning of the flush.
	WithFlush Spread `json:"withFlushMicroseconds"`
	// Early counts the flushes that canaryd's poll noticed before that moment. Their Delay is
	// 0.
	Early int `json:"early"`
	// Extra counts flush records beyond one for each flush.
	Extra int `json:"extra"`
}

// The moments from which delays count.
const (
	fromCommit  = "the commit" // the end of the system call that commits
	fromRelease = "the lock's release"
	fromProgram = "the end of iptables -F, which took another lock"
)

// A flusher flushes one table and returns the time when that was done.
type flusher func(ctx context.Context, f rules.Family, t rules.TableName) (time.Time, error)

// bigEvery is the period, in flushes, of flushing the table with the services. Putting 20,000
// rules back takes a second, so most flushes are of the other five tables.
const bigEvery = 20

// againEvery is the number of flushes after which the daemon is restarted. It would take this
// benchmark for a fight, and wait up to ten seconds before each replay. A daemon that has just
// started replays at once.
const againEvery = 5

// victims returns the tables to flush, in order.
func victims(times int) []rules.TableID {
	small := []rules.TableID{
		rules.IPv4.Table(rules.Mangle), rules.IPv4.Table(rules.Filter),
		rules.IPv6.Table(rules.Mangle), rules.IPv6.Table(rules.Nat), rules.IPv6.Table(rules.Filter),
	}
	all := make([]rules.TableID, times)
	for i := range all {
		all[i] = small[i%len(small)]
		if i%bigEvery == bigEvery-1 {
			all[i] = rules.IPv4.Table(rules.Nat)
		}
	}
	return all
}

// verdicts flushes that many times, each time after all rules are in force again, and compares
// the times with the flush records.
func (n *node) verdicts(ctx context.Context, counted string, times int, flush flusher) (Verdict, error) {
	v := Verdict{Counted: counted}
	last, err := n.settle(ctx, nil)
	if err != nil {
		return v, err
	}
	var delays, whole []time.Duration
	for i, victim := range victims(times) {
		if i > 0 && i%againEvery == 0 {
			if last, err = n.again(ctx); err != nil {
				return v, fmt.Errorf("starting canaryd again after %d flushes: %w", i, err)
			}
			if err := pause(ctx, time.Second); err != nil {
				return v, err
			}
		}
		// The wait is random, so that flushes come at any time between two polls.
		if err := pause(ctx, 50*time.Millisecond+rand.N(100*time.Millisecond)); err != nil {
			return v, err
		}
		begin := time.Now()
		done, err := flush(ctx, victim.Family, victim.Name)
		if err != nil {
			return v, fmt.Errorf("flushing %s: %w", victim, err)
		}
		now, err := n.settle(ctx, last)
		if err != nil {
			return v, fmt.Errorf("after a flush of %s: %w", victim, err)
		}
		newer := after(now, last)
		first := newer[len(newer)-1]
		knew := first.Time.Add(time.Duration(first.NoticedSeconds * float64(time.Second)))
		if knew.Before(done) {
			v.Early++
		}
		v.Extra += len(newer) - 1
		delays = append(delays, max(knew.Sub(done), 0))
		whole = append(whole, knew.Sub(begin))
		last = now
	}
	v.Delay, v.WithFlush = spread(delays), spread(whole)
	return v, nil
}

// after returns the records in now that before lacks, newest first.
func after(now, before []api.Flush) []api.Flush {
	if len(before) == 0 {
		return now
	}
	i := slices.IndexFunc(now, func(f api.Flush) bool { return f.ID == before[0].ID })
	if i < 0 {
		return now
	}
	return now[:i]
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// A batch flushes nft tables through a netlink connection of its own. The kernel commits within
// the system call that sends the batch. So its end shows the moment of the commit better than
// the end of a program.
type batch struct{ conn *netlink.Conn }

func openBatch() (*batch, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	return &batch{conn}, err
}

// flush acts like "nft flush table": it sends one NFT_MSG_DELRULE without a chain.
func (b *batch) flush(_ context.Context, f rules.Family, t rules.TableName) (time.Time, error) {
	const begin, end = 0x10, 0x11 // NFNL_MSG_BATCH_BEGIN and _END
	family := map[rules.Family]byte{rules.IPv4: unix.NFPROTO_IPV4, rules.IPv6: unix.NFPROTO_IPV6}[f]
	table, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_RULE_TABLE, Data: append([]byte(t), 0)}})
	if err != nil {
		return time.Time{}, err
	}
	message := func(kind uint16, flags netlink.HeaderFlags, head, data []byte) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request | flags}, Data: append(head, data...)}
	}
	edge := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES} // struct nfgenmsg
	sent, err := b.conn.SendMessages([]netlink.Message{
		message(begin, 0, edge, nil),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELRULE, netlink.Acknowledge, []byte{family, unix.NFNETLINK_V0, 0, 0}, table),
		message(end, 0, edge, nil),
	})
	done := time.Now()
	if err != nil {
		return done, err
	}
	answers, err := b.conn.Receive() // turns the kernel's refusal into an error
	if err == nil && (len(answers) != 1 || answers[0].Header.Sequence != sent[1].Header.Sequence) {
		err = fmt.Errorf("netlink answered %v", answers)
	}
	return done, err
}

func (b *batch) close() error { return b.conn.Close() }

// underLock flushes a legacy table while this process holds the xtables lock, and returns the
// time when it released the lock.
func underLock(ctx context.Context, f rules.Family, t rules.TableName) (released time.Time, err error) {
	fd, err := unix.Open(lockFile, unix.O_RDONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return time.Time{}, err
	}
	if err = unix.Flock(fd, unix.LOCK_EX); err == nil {
		_, err = withoutLock(ctx, f, t)
	}
	released = time.Now()
	return released, errors.Join(err, unix.Close(fd))
}

// withoutLock flushes a legacy table; see otherLock.
func withoutLock(ctx context.Context, f rules.Family, t rules.TableName) (time.Time, error) {
	err := scenario.Programs{With: iptables.Legacy}.Flush(ctx, f, t, "")
	return time.Now(), err
}
