package protect

import (
	"path"

	"github.com/canaryd/canaryd/pkg/rules"
)

// An Emptying is a habit of a chain's owner: whether it leaves the chain without a rule while other
// rules lead to it.
type Emptying int

// The habits.
const (
	// EmptyOften: the last rule of the chain may go by name, or the chain is the operator's own. It
	// is also the habit of an owner that is not known, as of a chain that only a glob names.
	EmptyOften Emptying = iota
	// EmptyBriefly: the owner flushes the chain, and fills or deletes it by a later command.
	EmptyBriefly
	// EmptyUnreferenced: the owner empties the chain only after it has deleted all jumps to it, or
	// in the same transaction.
	EmptyUnreferenced
	// EmptyNever: the owner never leaves the chain empty, whatever leads to it.
	EmptyNever
)

// habits has what owners do to their chains. Chains are names or globs, as path.Match has them. The
// first row that fits counts; a chain without a row is EmptyOften.
//
// Sources, read in 2026:
//
//	kube-proxy   pkg/proxy/iptables: a sync rewrites each chain that it touches, and deletes stale
//	             ones, in one iptables-restore of all tables. filter's chains hold rules for some
//	             services only, and so does nat's KUBE-NODEPORTS. pkg/proxy/ipvs does the same.
//	kubelet      pkg/kubelet/kubelet_network_linux.go: EnsureRule, nothing is deleted
//	portmap      plugins/meta/portmap: SETMARK's and MASQ's rule is never deleted. teardown flushes
//	             the container's chain, deletes its jump, and then the chain.
//	firewall     plugins/meta/firewall: CNI-FORWARD begins with a jump to CNI-ADMIN, and the
//	             isolation chains end with RETURN; these are never deleted.
//	ipMasq       pkg/ip: the jump is deleted first. With a second address, its jump still stands
//	             when the chain is flushed.
//	Docker       moby daemon/libnetwork: a start flushes the chains before it fills them.
//	             DOCKER-FORWARD has three jumps as long as Docker runs, and DOCKER-INGRESS a RETURN;
//	             in the others rules of networks and containers come and go. See "cleaned" in the
//	             golden files of iptabler. DOCKER-USER is the operator's.
//	netavark     src/firewall/varktables: TeardownPolicy::Never keeps SETMARK's and MASQ's rule. Of
//	             a network's chains it deletes the rules before their jump.
//	libvirt      src/network/network_iptables.c: rules of networks come and go
//	Tailscale    wgengine/router: a start clears the chains, inserts the jumps, and then fills the
//	             chains. --snat-subnet-routes=false deletes ts-postrouting's only rule.
//	flannel      pkg/trafficmngr/iptables: a restart empties the chains for seconds
//	kube-router  pkg/controllers/netpol: one iptables-restore of the table filter
//	CRI-O        internal/hostport: a container's chains are written and deleted in one
//	             iptables-restore
var habits = []struct {
	table  rules.TableName
	habit  Emptying
	chains []string
}{
	{rules.Nat, EmptyNever, []string{"KUBE-SERVICES", "KUBE-MARK-MASQ", "KUBE-POSTROUTING"}},
	{rules.Filter, EmptyNever, []string{"KUBE-FORWARD", "KUBE-FIREWALL"}},
	{rules.Nat, EmptyUnreferenced, []string{
		"KUBE-MARK-DROP", "KUBE-SVC-*", "KUBE-SVL-*", "KUBE-SEP-*", "KUBE-EXT-*", "KUBE-FW-*", "KUBE-XLB-*",
		"CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ", "NETAVARK-HOSTPORT-SETMARK", "NETAVARK-HOSTPORT-MASQ",
		"KUBE-HP-*", "CRIO-MASQ-*",
	}},
	{rules.Filter, EmptyUnreferenced, []string{"CNI-FORWARD", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2", "KUBE-POD-FW-*"}},
	{rules.Nat, EmptyOften, []string{"CNI-HOSTPORT-*", "NETAVARK-HOSTPORT-*"}},
	{rules.Nat, EmptyBriefly, []string{"CNI-*", "NETAVARK-*", "DOCKER-INGRESS", "FLANNEL-POSTRTG"}},
	{rules.Filter, EmptyBriefly, []string{"DOCKER-FORWARD", "DOCKER-INGRESS", "ts-input", "ts-forward", "FLANNEL-FWD"}},
}

// EmptyingOf returns the habit of the owner of a chain.
func EmptyingOf(t rules.TableName, chain string) Emptying {
	for _, h := range habits {
		if h.table != t {
			continue
		}
		for _, glob := range h.chains {
			if ok, _ := path.Match(glob, chain); ok { // TestEmptyingOf matches each glob
				return h.habit
			}
		}
	}
	return EmptyOften
}
