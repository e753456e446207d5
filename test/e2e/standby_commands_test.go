package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// ownersCommands are commands of administrators and of programs with rules of
// their own. Some of them fail, as they do on any node.
var ownersCommands = []string{
	// An administrator looks.
	"iptables-save", "ip6tables-save", "iptables-save -t nat", "iptables -w -S", "iptables -w -t nat -S", "ip6tables -w -t nat -S",
	"iptables -w -t nat -n -L", "iptables -w -t nat -n -L KUBE-SERVICES", "iptables -w -t nat -n -L NO-SUCH",
	"nft list table ip nat", "nft list table ip6 nat", "nft list chain ip nat KUBE-SERVICES", "nft -c flush ruleset",
	"iptables-save | iptables-restore --test", "iptables-save -t filter | iptables-restore -w 5",
	// They add and delete a chain.
	"iptables -w -t nat -N OFFICE", "iptables -w -t nat -N OFFICE", "iptables -w -t nat -A OFFICE -p tcp --dport 8443 -j REDIRECT --to-ports 443",
	"iptables -w -t nat -I PREROUTING -j OFFICE", "iptables -w -t nat -X OFFICE", "iptables -w -t nat -C PREROUTING -j OFFICE",
	"iptables -w -t nat -D PREROUTING -j OFFICE", "iptables -w -t nat -F OFFICE", "iptables -w -t nat -X OFFICE", "iptables -w -t nat -X OFFICE",
	// They use a set, and destroy it when no rule names it.
	"ipset create office hash:ip", "iptables -w -t nat -A OUTPUT -m set --match-set office dst -j ACCEPT", "ipset destroy office",
	"iptables -w -t nat -D OUTPUT -m set --match-set office dst -j ACCEPT", "ipset destroy office",
	// Docker starts for the first time, and again. It decides by exit codes and
	// error texts.
	dockerStarts, dockerStarts,
	// They test a restore over nat, and flush everything.
	"iptables-save -t nat | grep -v KUBE-SEP | iptables-restore --test", "iptables -w -t nat -X", "nft flush ruleset",
}

// dockerStarts is the commands of dockerd 20 to 28 at its start, in its order.
// They remove the rules of an earlier run, and set up nat and filter.
const dockerStarts = `
for args in \
	"nat -D PREROUTING -m addrtype --dst-type LOCAL -j DOCKER" \
	"nat -D OUTPUT -m addrtype --dst-type LOCAL ! --dst 127.0.0.0/8 -j DOCKER" \
	"nat -D PREROUTING -j DOCKER" "nat -D OUTPUT -j DOCKER" "nat -F DOCKER" "nat -X DOCKER" \
	"filter -F DOCKER-ISOLATION-STAGE-1" "filter -X DOCKER-ISOLATION-STAGE-1" \
	"nat -n -L DOCKER" "nat -N DOCKER" "filter -n -L DOCKER" "filter -N DOCKER" \
	"filter -n -L DOCKER-ISOLATION-STAGE-1" "filter -N DOCKER-ISOLATION-STAGE-1" \
	"filter -C DOCKER-ISOLATION-STAGE-1 -j RETURN" "filter -A DOCKER-ISOLATION-STAGE-1 -j RETURN" \
	"nat -C POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE" "nat -I POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE" \
	"nat -C DOCKER -i docker0 -j RETURN" "nat -I DOCKER -i docker0 -j RETURN" \
	"nat -C PREROUTING -m addrtype --dst-type LOCAL -j DOCKER" "nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER" \
	"nat -C OUTPUT -m addrtype --dst-type LOCAL -j DOCKER ! --dst 127.0.0.0/8" "nat -A OUTPUT -m addrtype --dst-type LOCAL -j DOCKER ! --dst 127.0.0.0/8" \
	"filter -C FORWARD -o docker0 -j DOCKER" "filter -I FORWARD -o docker0 -j DOCKER" \
	"nat -A DOCKER -p tcp -d 0/0 --dport 8080 -j DNAT --to-destination 172.17.0.2:80 ! -i docker0" \
	"nat -A POSTROUTING -p tcp -s 172.17.0.2 -d 172.17.0.2 --dport 80 -j MASQUERADE"
do
	iptables --wait -t $args
	echo "$? iptables --wait -t $args" >&2
done`

// TestCommandsNextToTheStandby: each command must have the same output and exit
// code as on a node whose canaryd has no standby.
func TestCommandsNextToTheStandby(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "ipset", "nft")
		var transcripts [2][]string
		for i, flag := range []string{"--standby=off", "--standby=on"} {
			nstest.Command(n.T, "nft", "flush", "ruleset")
			n.Must(os.RemoveAll("/run/state"))
			n.Load()
			d := n.Start(flag)
			if i == 1 {
				wantStandbyState(n, "armed")
			}
			for _, command := range ownersCommands {
				transcripts[i] = append(transcripts[i], transcript(n, command))
			}
			n.Healed(1)
			d.Stop()
		}
		if diff := cmp.Diff(transcripts[0], transcripts[1]); diff != "" {
			n.Errorf("what commands print next to the standby (-without +with):\n%s", diff)
		}
		if text := strings.Join(transcripts[0], ""); !strings.Contains(text, "0 iptables-nft --wait -t nat -N DOCKER\n") || !strings.Contains(text, "KUBE-SVC-") {
			n.Errorf("these are not the commands that were meant:\n%s", text)
		}
	})
}

// varying matches the differences between two runs of a command: the time,
// counters, handles and the nonces of canaryd's marks.
var varying = regexp.MustCompile(`(?m)^# .*\n|\[\d+:\d+\]|packets \d+ bytes \d+|# handle \d+|canaryd-[a-z]+:[0-9a-f]+`)

// transcript runs a command with the backend's iptables and returns its output
// and result.
func transcript(n *nodetest.Node, command string) string {
	n.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(n.Context(), "sh", "-c", named(command))
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		n.Fatalf("%s: %v", command, err)
	}
	text := fmt.Sprintf("%s: exit %d\n%s%s", command, cmd.ProcessState.ExitCode(), &stdout, &stderr)
	return varying.ReplaceAllString(text, "*")
}

// named puts the names of iptables-nft's programs into a command.
func named(command string) string {
	return regexp.MustCompile(`\b(ip6?tables)(-save|-restore)?\b`).ReplaceAllString(command, "$1-nft$2")
}
