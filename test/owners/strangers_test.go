package owners

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"sync"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// strangersStories are about programs that protect nothing and flush nothing
// protected.
func strangersStories() []story {
	return []story{
		{
			name: "native nft rules come into our tables and go", backends: []iptables.Backend{iptables.NFT}, same: true,
			happens: nativeRules,
		},
		{name: "iptables-save and iptables -S, again and again", happens: readers},
		{name: "tables of others are deleted or flushed", same: true, happens: foreignTables},
	}
}

// nativeRules adds rules of nft to chains of every table, first, last and in the
// middle, and removes them. iptables-nft can neither print nor edit them.
func nativeRules(n *nodetest.Node, _ *nodetest.Process) {
	handle := regexp.MustCompile(`native-canaryd-test.* # handle (\d+)`)
	for _, family := range []string{"ip", "ip6"} {
		chains := []string{
			"nat PREROUTING", "nat KUBE-SERVICES", "nat KUBE-MARK-MASQ", "filter FORWARD", "filter KUBE-FORWARD", "mangle KUBE-IPTABLES-HINT",
		}
		for _, chain := range chains {
			for _, verb := range []string{"add", "insert"} {
				words := fmt.Sprintf(`%s rule %s %s meta mark { 0x7771, 0x7773-0x7779 } log prefix "native-canaryd-test" counter`, verb, family, chain)
				nstest.Command(n.T, "nft", words)
			}
			n.Looked()
		}
		polled(n, moment)
		for _, chain := range chains {
			listed := nstest.Command(n.T, "nft", "-a", "list", "chain", fmt.Sprintf("%s %s", family, chain))
			found := handle.FindAllStringSubmatch(listed, -1)
			if len(found) != 2 {
				n.Fatalf("%s %s holds %d native rules, want 2:\n%s", family, chain, len(found), listed)
			}
			for _, f := range found {
				nstest.Command(n.T, "nft", fmt.Sprintf("delete rule %s %s handle %s", family, chain, f[1]))
			}
			n.Looked()
		}
	}
}

// readers reads all tables as fast as two processes at a time can.
func readers(n *nodetest.Node, _ *nodetest.Process) {
	var all sync.WaitGroup
	for _, family := range rules.Families() {
		all.Go(func() {
			for i := range testkit.Size(25, 100) {
				table := protect.Always()[i%3]
				if _, err := n.Programs.Save(n.Context(), family); err != nil {
					n.Error(err)
				}
				if err := exec.CommandContext(n.Context(), program(n, family, ""), "-w", "5", "-t", string(table), "-S").Run(); err != nil {
					n.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// foreignTables deletes and flushes tables without protected rules.
func foreignTables(n *nodetest.Node, _ *nodetest.Process) {
	for range 5 {
		for _, family := range rules.Families() {
			for _, table := range []rules.TableName{rules.Raw, rules.Security} {
				chain := map[rules.TableName]string{rules.Raw: "PREROUTING", rules.Security: "FORWARD"}[table]
				n.Must(n.Programs.RestoreNoflush(n.Context(), family,
					fmt.Sprintf("*%[1]s\n:OTHERS - [0:0]\n-A %[2]s -j OTHERS\n-A OTHERS -i eth7 -j ACCEPT\nCOMMIT\n", table, chain)))
				n.Looked()
				run(n, family, table, "-F")
				run(n, family, table, "-X")
			}
		}
		// This also runs on the backend legacy: then nft has only these tables.
		nstest.CommandInput(n.T, strings.ReplaceAll(`
			add table FAMILY canaryd-test
			add chain FAMILY canaryd-test filter { type filter hook forward priority 0 ; }
			add rule FAMILY canaryd-test filter counter accept
			`, "FAMILY", "inet"), "nft", "-f", "-")
		n.Looked()
		nstest.Command(n.T, "nft", "flush", "table", "inet", "canaryd-test")
		nstest.Command(n.T, "nft", "delete", "table", "inet", "canaryd-test")
		if n.Programs.With == iptables.NFT {
			nstest.Command(n.T, "nft", "delete", "table", "ip", "raw")
			nstest.Command(n.T, "nft", "delete", "table", "ip6", "security")
		}
	}
	for _, family := range rules.Families() { // leaves the tables as they were
		for _, table := range []rules.TableName{rules.Raw, rules.Security} {
			run(n, family, table, "-F")
		}
	}
}
