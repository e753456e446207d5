package owners

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// storm replaces one endpoint again and again, both of its rules in one commit,
// 100 times a second, or as fast as the machine can. On legacy every commit
// exchanges all of the table's rules. An idle machine exchanges 13,000 rules 60
// times a second (Linux 6.18). The rate alone does not make a storm. In a storm
// commits arrive before canaryd knows the earlier ones, and canaryd must still
// learn from them.
func storm(n *nodetest.Node, _ *nodetest.Process) {
	const each = 10 * time.Millisecond
	commits := testkit.Size(100, 500)
	// On legacy commits also wait in a pipe, so only the second number is
	// meaningful there.
	overtaken, learned := commits/2, 2
	chain, old := endpoint(n)
	address := netip.MustParseAddr(regexp.MustCompile(`-s ([0-9.]+)`).FindStringSubmatch(old[0].Spec)[1])
	owner := restoreOwner
	if n.Programs.With == iptables.NFT {
		owner = netlinkOwner
	}
	commit, finish := owner(n, chain, old, address)
	var last netip.Addr
	done, unknown, known := 0, 0, 0
	start, before := time.Now(), n.Published().Generation.ID
	for range testkit.During(n.T, testkit.Left(n.T), "the storm, until canaryd has learned in it") {
		if done >= commits && unknown >= overtaken && known >= learned {
			break
		}
		testkit.Pass(n.T, time.Until(start.Add(time.Duration(done)*each)), "the distance of two commits")
		switch now := n.Published().Generation.ID; {
		case now != before:
			before, known = now, known+1
		case done > 0:
			unknown++
		}
		last = netip.AddrFrom4([4]byte{10, 200, byte(done / 250), byte(done%250 + 1)})
		commit(last)
		done++
	}
	finish()
	if unknown < overtaken || known < learned {
		n.Fatalf("%d of %d commits came before the one before was known, want %d; %d generations were seen meanwhile, want %d", unknown, done, overtaken, known, learned)
	}
	n.Logf("%d commits, %.0f a second, %d before the one before was known; %d generations seen meanwhile", done, float64(done)/time.Since(start).Seconds(), unknown, known)
	n.Until("the owner's last endpoint in the generation", func() error {
		text, _ := n.Want(0, "render", "--ip-family=ipv4")
		if !strings.Contains(text, fmt.Sprintf("--to-destination %s:", last)) {
			return fmt.Errorf("%s is not in it", last)
		}
		return nil
	})
}

// endpoint returns the chain of an endpoint with its two rules.
func endpoint(n *nodetest.Node) (string, []rules.Rule) {
	n.Helper()
	for _, c := range n.Save()[rules.IPv4][rules.Nat].Chains {
		if strings.HasPrefix(c.Name, "KUBE-SEP-") && len(c.Rules) == 2 && c.Rules[1].Target == "DNAT" {
			return c.Name, c.Rules
		}
	}
	n.Fatal("there is no endpoint")
	return "", nil
}

// restoreOwner commits through an iptables-restore that runs all the time,
// because starting one takes longer than 10 ms.
func restoreOwner(n *nodetest.Node, chain string, old []rules.Rule, address netip.Addr) (commit func(netip.Addr), finish func()) {
	n.Helper()
	r := &restorer{n: n}
	r.start()
	commit = func(next netip.Addr) {
		text := "*nat\n"
		for at, rule := range old {
			text += fmt.Sprintf("-R %s %d %s\n", chain, at+1, strings.ReplaceAll(rule.Spec, address.String(), next.String()))
		}
		r.write(text + "COMMIT\n")
	}
	return commit, r.finish
}

// A restorer is the iptables-restore of an owner. Like kube-proxy's it waits for
// the lock, and tries again if it did not get the lock. canaryd holds the lock
// while it reads new rules: for 0.4 s here, and for 4 s next to 20 busy processes
// on two cores.
type restorer struct {
	n        *nodetest.Node
	cmd      *exec.Cmd
	input    io.WriteCloser
	said     *bytes.Buffer
	last     string // the last commit to make
	attempts int
}

func (r *restorer) start() {
	const most = 5 // one attempt suffices on most machines
	if r.attempts++; r.attempts > most {
		r.n.Fatalf("the owner's restore ended %d times: %s", most, r.said)
	}
	r.cmd, r.said = exec.CommandContext(r.n.Context(), program(r.n, rules.IPv4, "-restore"), "-w", "5", "--noflush"), &bytes.Buffer{}
	r.cmd.Stdout, r.cmd.Stderr = r.said, r.said
	var err error
	r.input, err = r.cmd.StdinPipe()
	r.n.Must(err)
	r.n.Must(r.cmd.Start())
}

func (r *restorer) write(text string) {
	r.last = text
	if _, err := io.WriteString(r.input, text); err != nil {
		r.again(r.cmd.Wait())
	}
}

// again starts another restore for the last commit, if the previous restore ended
// without the lock. It may also have ended in silence. The alarm that ends its
// waiting fires even if it got the lock. If it waits for input then, it takes the
// alarm for the end (iptables-legacy 1.8.9).
func (r *restorer) again(ended error) {
	const noResource = 4 // RESOURCE_PROBLEM of xtables
	locked := r.cmd.ProcessState.ExitCode() == noResource && strings.Contains(r.said.String(), "xtables lock")
	if ended != nil && !locked {
		r.n.Fatalf("the owner's restore: %v: %s", ended, r.said)
	}
	r.n.Logf("the owner begins again: %v: %s", ended, r.said)
	r.start()
	r.write(r.last)
}

// finish waits until all is committed.
func (r *restorer) finish() {
	r.n.Must(r.input.Close())
	for err := r.cmd.Wait(); err != nil; err = r.cmd.Wait() {
		r.again(err)
		r.n.Must(r.input.Close())
	}
}

// netlinkOwner commits to nf_tables itself: it reads the chain's rules and
// replaces them by the same rules with another address.
func netlinkOwner(n *nodetest.Node, chain string, old []rules.Rule, address netip.Addr) (commit func(netip.Addr), finish func()) {
	n.Helper()
	const nft = unix.NFNL_SUBSYS_NFTABLES << 8
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	n.Must(err)
	protocols := map[string]uint32{"-p tcp": unix.IPPROTO_TCP, "-p udp": unix.IPPROTO_UDP, "-p sctp": unix.IPPROTO_SCTP}
	where := func() *netlink.AttributeEncoder {
		e := netlink.NewAttributeEncoder()
		e.ByteOrder = binary.BigEndian
		e.String(unix.NFTA_RULE_TABLE, string(rules.Nat))
		e.String(unix.NFTA_RULE_CHAIN, chain)
		return e
	}
	message := func(kind netlink.HeaderType, flags netlink.HeaderFlags, family byte, id byte, attributes []byte) netlink.Message {
		head := []byte{family, 0, 0, id} // struct nfgenmsg
		return netlink.Message{Header: netlink.Header{Type: kind, Flags: netlink.Request | flags}, Data: append(head, attributes...)}
	}
	replace := func(next netip.Addr) {
		question, err := where().Encode()
		n.Must(err)
		standing, err := conn.Execute(message(nft|unix.NFT_MSG_GETRULE, netlink.Dump, unix.AF_INET, 0, question))
		n.Must(err)
		if len(standing) != len(old) {
			n.Fatalf("%s holds %d rules, want %d", chain, len(standing), len(old))
		}
		batch := []netlink.Message{message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil)}
		for i, rule := range standing {
			e := where()
			d, err := netlink.NewAttributeDecoder(rule.Data[4:])
			n.Must(err)
			for d.Next() {
				switch d.Type() {
				case unix.NFTA_RULE_HANDLE:
					e.Bytes(unix.NFTA_RULE_HANDLE, d.Bytes())
				case unix.NFTA_RULE_EXPRESSIONS:
					words := bytes.ReplaceAll(d.Bytes(), address.AsSlice(), next.AsSlice())
					e.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, words)
				}
			}
			n.Must(d.Err())
			if protocol := protocols[regexp.MustCompile(`-p (\w+)`).FindString(old[i].Spec)]; protocol != 0 {
				// The kernel does not report the protocol, but requires it,
				// because matches check it.
				e.Nested(unix.NFTA_RULE_COMPAT, func(e *netlink.AttributeEncoder) error {
					e.ByteOrder = binary.BigEndian
					e.Uint32(unix.NFTA_RULE_COMPAT_PROTO, protocol)
					e.Uint32(unix.NFTA_RULE_COMPAT_FLAGS, 0)
					return nil
				})
			}
			data, err := e.Encode()
			n.Must(err)
			batch = append(batch, message(nft|unix.NFT_MSG_NEWRULE, netlink.Acknowledge|netlink.Replace, unix.AF_INET, 0, data))
		}
		batch = append(batch, message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil))
		_, err = conn.SendMessages(batch)
		n.Must(err)
		for acknowledged := 0; acknowledged < len(old); {
			answers, err := conn.Receive()
			n.Must(err)
			acknowledged += len(answers)
		}
		address = next
	}
	return replace, func() { n.Must(conn.Close()) }
}
