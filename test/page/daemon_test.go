package page

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestDaemon: a person watches the page of a running canaryd. The node is flushed in a pause
// and healed, and canaryd is stopped.
func TestDaemon(t *testing.T) {
	nodetest.In(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		n.Env = append(n.Env, "NODE_NAME=node-7")
		p := n.Start()
		tab := open(n.T, start(n.T), nodetest.HTTP+"/", desk)
		begins := func(words string) {
			n.Helper()
			tab.within(words, `document.querySelector('h1').textContent.startsWith('`+words+`')`)
		}
		begins("Healthy")
		if text := tab.text("body"); !strings.Contains(text, "node-7") || !strings.Contains(text, "No flush seen since") {
			n.Errorf("before any flush it says:\n%s", text)
		}
		n.Want(0, "pause", "--for=10m")
		begins("Paused until")
		n.Flush()
		begins("Rules missing since")
		tab.within("the flush", `document.querySelectorAll('details').length === 1`)
		if text := tab.text("main"); !strings.Contains(text, "Paused: nothing is put back until") || !strings.Contains(text, "waiting: paused") {
			n.Errorf("in the outage it says:\n%s", text)
		}
		n.Want(0, "resume")
		begins("Healthy")
		tab.within("the outcome", `document.querySelector('.outcome').innerText === 'proved'`)
		// The greatest culprit is the first.
		if got := tab.text(".by"); !strings.HasSuffix(got, " (+4)") || !strings.Contains(got, "iptables") || !strings.Contains(got, "ip6tables") {
			n.Errorf("it was flushed by %q", got)
		}
		tab.value(`document.querySelector('details').open = true`)
		if text := tab.text(".chains"); !strings.Contains(text, "KUBE-SERVICES") || !strings.Contains(text, "ipv6 nat emptied:") {
			n.Errorf("what was lost is reported as:\n%s", text)
		}
		// The command in the record shows the rest.
		words := strings.Fields(tab.text(".record code.run"))
		if told, _ := n.Want(0, words[1], words[2:]...); !strings.Contains(told, "-A KUBE-SERVICES") {
			n.Errorf("%q prints:\n%s", words, told)
		}
		tab.clean()
		p.Stop()
		tab.within("a stale page", `document.body.classList.contains('stale')`)
	})
}
