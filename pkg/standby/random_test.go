package standby_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A deck draws random nat rules that the copy knows, and flows that meet them.
type deck struct {
	*rand.Rand
	family tableid.Family
	// odd lets it draw matches that the copy does not know.
	odd bool
}

// pickOf returns one of several.
func pickOf[T any](d *deck, all ...T) T { return all[d.IntN(len(all))] }

// address draws from few addresses, so that rules and flows meet.
func (d *deck) address(net byte) netip.Addr {
	n := byte(1 + d.IntN(4))
	if d.family == tableid.IPv6 {
		return netip.AddrFrom16([16]byte{0xfd, 0, 0, net, 15: n})
	}
	return netip.AddrFrom4([4]byte{10, net, 0, n})
}

// prefix returns an address with a length, perhaps inverted.
func (d *deck) prefix(option string, net byte) string {
	bits := pickOf(d, 32, 32, 31, 24, 16)
	if d.family == tableid.IPv6 {
		bits = pickOf(d, 128, 128, 127, 64, 48)
	}
	p, _ := d.address(net).Prefix(bits)
	return fmt.Sprintf("%s%s %s", pickOf(d, "", "", "", "! "), option, p)
}

// These are the nets of clients, services and pods.
const (
	clients  = 1
	services = 2
	pods     = 3
)

// ports are the ports in rules and flows.
var ports = []uint16{53, 80, 81, 443}

// matches draws the matches of a rule. protocol is "" if they name none.
func (d *deck) matches() (text []string, protocol string) {
	if d.IntN(3) == 0 {
		text = append(text, d.prefix("-s", clients))
	}
	if d.IntN(2) == 0 {
		text = append(text, d.prefix("-d", pickOf[byte](d, services, services, pods)))
	}
	if d.IntN(6) == 0 {
		text = append(text, pickOf(d, "-i in", "! -i in", "-i o+"))
	}
	if protocol = pickOf(d, "", "udp", "udp", "tcp"); protocol != "" {
		text = append(text, "-p "+protocol)
		port := fmt.Sprint(pickOf(d, ports...))
		switch d.IntN(5) {
		case 0:
			text = append(text, "-m multiport --dports 80,443,1000:2000")
		case 1:
			text = append(text, fmt.Sprintf("-m %s %s--sport 1024:%d", protocol, pickOf(d, "", "! "), 40000))
		default:
			text = append(text, fmt.Sprintf("-m %s %s--dport %s", protocol, pickOf(d, "", "", "! "), pickOf(d, port, port, "53:"+port, "53:443")))
		}
	}
	other := []string{
		"-m mark --mark 0x4000/0x4000", "-m mark ! --mark 0x1/0x3", "-m conntrack --ctstate NEW", "-m conntrack ! --ctstate INVALID --ctproto 17",
		"-m addrtype --dst-type LOCAL", "-m addrtype ! --src-type LOCAL", "-m statistic --mode random --probability 1.00000000000",
		"-m recent --set --name seen --rsource", `-m comment --comment "a service's"`,
	}
	for range d.IntN(3) {
		text = append(text, pickOf(d, other...))
	}
	if d.odd && d.IntN(20) == 0 {
		text = append(text, pickOf(d, "-m length --length 0:65535", "-m length --length 4000", "-m u32 --u32 0x0&0x0=0x0"))
	}
	return text, protocol
}

// to draws the new address of a DNAT or SNAT.
func (d *deck) to(net byte, protocol string) string {
	a := d.address(net)
	text := a.String()
	if d.IntN(4) == 0 {
		text += "-" + a.Next().Next().String()
	}
	if protocol == "" || d.IntN(3) == 0 {
		return text
	}
	if d.family == tableid.IPv6 {
		text = "[" + text + "]"
	}
	return text + pickOf(d, ":800", ":800", ":800-810")
}

// flags draws options for the kernel's choice.
func (d *deck) flags(all ...string) string {
	if d.IntN(4) > 0 {
		return ""
	}
	return " " + pickOf(d, all...)
}

// sendsElsewhere draws a target for a chain on the way in.
func (d *deck) sendsElsewhere(next []string, protocol string) string {
	switch d.IntN(9) {
	case 0:
		return pickOf(d, "RETURN", "ACCEPT")
	case 1:
		return pickOf(d, "MARK --set-xmark 0x4000/0x4000", "MARK --set-xmark 0x1/0x3", "MARK --set-xmark 0x4000/0x0")
	case 2:
		return pickOf(d, "LOG --log-prefix x", "NFLOG --nflog-group 3")
	case 3:
		if protocol != "" {
			return "REDIRECT --to-ports " + pickOf(d, "800", "800-810") + d.flags("--random")
		}
	case 4, 5, 6:
		return "DNAT --to-destination " + d.to(pods, protocol) + d.flags("--random", "--persistent", "--random --persistent")
	}
	if len(next) == 0 {
		return "DNAT --to-destination " + d.to(pods, protocol)
	}
	return pickOf(d, next...)
}

// hides draws a target for a chain on the way out.
func (d *deck) hides(next []string, protocol string) string {
	switch d.IntN(8) {
	case 0:
		return pickOf(d, "RETURN", "ACCEPT")
	case 1:
		return pickOf(d, "MARK --set-xmark 0x4000/0x0", "MARK --set-xmark 0x0/0x4000")
	case 2, 3:
		return "SNAT --to-source " + d.to(services, protocol) + d.flags("--random", "--random-fully", "--persistent")
	case 4, 5:
		ports := ""
		if protocol != "" && d.IntN(2) == 0 {
			ports = " --to-ports " + pickOf(d, "800", "800-810")
		}
		return "MASQUERADE" + ports + d.flags("--random", "--random-fully")
	}
	if len(next) == 0 {
		return "MASQUERADE"
	}
	return pickOf(d, next...)
}

// nat draws a table. Jumps lead from a chain to later chains only.
func (d *deck) nat() string {
	var in, out []string
	var all, body strings.Builder
	for i := range 5 {
		in, out = append(in, fmt.Sprintf("KUBE-IN-%d", i)), append(out, fmt.Sprintf("KUBE-OUT-%d", i))
	}
	rule := func(chain string, target func(next []string, protocol string) string, next []string) {
		match, protocol := d.matches()
		to := target(next, protocol)
		option := "-j"
		if strings.HasPrefix(to, "KUBE-") && d.IntN(4) == 0 {
			option = "-g"
		}
		fmt.Fprintf(&body, "-A %s %s %s\n", chain, strings.Join(match, " "), option+" "+to)
	}
	all.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n")
	for _, group := range [][]string{in, out} {
		for i, chain := range group {
			fmt.Fprintf(&all, ":%s - [0:0]\n", chain)
			for range 2 + d.IntN(4) {
				if chain[5] == 'I' {
					rule(chain, d.sendsElsewhere, group[i+1:])
				} else {
					rule(chain, d.hides, group[i+1:])
				}
			}
		}
	}
	for _, base := range []string{"PREROUTING", "OUTPUT", "POSTROUTING"} {
		group := in
		if base == "POSTROUTING" {
			group = out
		}
		for range 3 {
			if d.IntN(3) == 0 { // another owner's exemption
				fmt.Fprintf(&body, "-A %s %s -j %s\n", base, d.prefix("-d", pickOf[byte](d, services, pods)), pickOf(d, "ACCEPT", "RETURN"))
			}
			match := ""
			if d.IntN(3) == 0 {
				match = d.prefix("-s", clients)
			}
			fmt.Fprintf(&body, "-A %s %s -j %s\n", base, match, pickOf(d, group[:3]...))
		}
	}
	return all.String() + body.String() + "COMMIT\n"
}

// flows draws first packets, from outside and from the node itself. Each has a source port of its
// own.
func (d *deck) flows(n int) []flow {
	var all []flow
	for i := range uint16(n) {
		f := flow{pickOf[uint8](d, unix.IPPROTO_UDP, unix.IPPROTO_UDP, unix.IPPROTO_TCP), netip.AddrPortFrom(d.address(clients), pickOf[uint16](d, 2000, 50000)+i), netip.AddrPortFrom(d.address(services), pickOf(d, ports...))}
		switch d.IntN(8) {
		case 0, 1, 2:
			f = flow{unix.IPPROTO_UDP, netip.AddrPortFrom(node[d.family], 30000+i), f.To}
		case 3:
			f.To = netip.AddrPortFrom(node[d.family], f.To.Port())
		}
		all = append(all, f)
	}
	return all
}
