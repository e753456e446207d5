package flushers

import (
	"fmt"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// savedFlushers load rules from a file.
func savedFlushers() []flusher {
	persistent := []string{"usr/sbin/netfilter-persistent", "usr/share/netfilter-persistent/plugins.d/15-ip4tables"}
	return []flusher{
		{
			name:    "nftables.service",
			standby: true,
			install: func(m *machine) {
				m.write("/etc/nftables.conf", nftablesConf)
			},
			steps: []step{
				{name: "`systemctl start nftables`", does: loadNftables, loses: onlyNFT},
				{name: "`systemctl reload nftables`", does: loadNftables, loses: onlyNFT},
				{name: "`systemctl stop nftables`", does: func(m *machine) { m.run("nft", "flush", "ruleset") }, loses: onlyNFT},
			},
		},
		{
			name:     "netfilter-persistent, a file of filter rules",
			unpacked: persistent,
			install: func(m *machine) {
				m.write("/etc/iptables/rules.v4", scenario.SavedFilter(rules.IPv4))
				m.write("/etc/iptables/rules.v6", scenario.SavedFilter(rules.IPv6))
			},
			steps: []step{
				{name: "`netfilter-persistent reload`", does: netfilterPersistent("reload"), loses: both},
				{name: "`netfilter-persistent restart`", does: netfilterPersistent("restart"), loses: both},
			},
		},
		{
			name:     "netfilter-persistent, with " + oneFlush[0],
			unpacked: persistent,
			flags:    oneFlush,
			install: func(m *machine) {
				m.write("/etc/default/netfilter-persistent", "FLUSH_ON_STOP=1\n")
			},
			steps: []step{
				{name: "`netfilter-persistent stop`, FLUSH_ON_STOP=1", does: netfilterPersistent("stop"), loses: both},
			},
		},
		{
			// The file has the former rules of Kubernetes, and canaryd's canaries with the
			// nonce of that time.
			name:     "netfilter-persistent, a file saved on the running node",
			unpacked: persistent,
			install:  func(*machine) {},
			steps: []step{
				{name: "`netfilter-persistent save`", does: netfilterPersistent("save")},
				{name: "`netfilter-persistent reload`, a service later", owners: newService, does: netfilterPersistent("reload"), loses: both},
			},
		},
	}
}

const nftablesConf = `#!/usr/sbin/nft -f

flush ruleset

table inet filter {
	chain input {
		type filter hook input priority filter; policy accept;
		iif lo accept
		ct state established,related accept
		tcp dport { 22, 10250 } accept
	}
	chain forward {
		type filter hook forward priority filter; policy accept;
	}
}
`

// loadNftables does the same as ExecStart and ExecReload of the unit.
func loadNftables(m *machine) { m.run("nft", "-f", "/etc/nftables.conf") }

func netfilterPersistent(what string) func(m *machine) {
	return func(m *machine) { m.run("netfilter-persistent", what) }
}

// newService writes another service as kube-proxy does, with an address of each family.
func newService(m *machine) {
	m.Helper()
	for _, of := range []struct {
		family             rules.Family
		service, pod, port string
	}{
		{rules.IPv4, "10.96.77.77/32", "10.1.7.7/32", "10.1.7.7:8080"},
		{rules.IPv6, "fd00:10:96::7777/128", "fd00:10:1::77/128", "[fd00:10:1::77]:8080"},
	} {
		m.Must(m.Programs.RestoreNoflush(m.Context(), of.family, fmt.Sprintf(`*nat
:KUBE-SVC-LATECOMER2345672 - [0:0]
:KUBE-SEP-LATECOMER2345673 - [0:0]
-A KUBE-SERVICES -d %[1]s -p tcp -m comment --comment "demo/latecomer cluster IP" -m tcp --dport 80 -j KUBE-SVC-LATECOMER2345672
-A KUBE-SVC-LATECOMER2345672 -m comment --comment "demo/latecomer -> %[3]s" -j KUBE-SEP-LATECOMER2345673
-A KUBE-SEP-LATECOMER2345673 -s %[2]s -j KUBE-MARK-MASQ
-A KUBE-SEP-LATECOMER2345673 -p tcp -m tcp -j DNAT --to-destination %[3]s
COMMIT
`, of.service, of.pod, of.port)))
	}
}
