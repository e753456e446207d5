package packets

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An attempt is one way of calling a service, and the wanted result.
type attempt struct {
	proof   string
	from    string
	number  int // of the client's address
	service string
	by      way

	end  string
	pods string // the pods that may answer
	seen string // the place whose address they see
	// target must have counted packets: otherwise a closed port may have caused a
	// refusal, and anything a silence.
	target string
}

const (
	bothPods = near + " " + far

	// many connections are spread over two endpoints, and each must get enough of
	// them. P(an endpoint gets less than 10 of 60) = 2 * sum(C(60, k), k < 10) /
	// 2^60 = 3e-8; a run of the test takes sixteen such samples.
	many   = 60
	enough = 10
)

func attempts() []attempt {
	ok := func(proof, from, service string, by way, pods, seen string) attempt {
		return attempt{proof: proof, from: from, service: service, by: by, end: answered, pods: pods, seen: seen}
	}
	no := func(end, proof, from, service string, by way) attempt {
		target := map[string]string{refused: "REJECT", silent: "DROP"}[end]
		return attempt{proof: proof, from: from, service: service, by: by, end: end, target: target}
	}
	second := func(a attempt) attempt { a.number = 1; return a }
	return []attempt{
		ok("cluster IP from a pod keeps the source", near, "plain", clusterIP, bothPods, own),
		ok("cluster IP from the other pod keeps the source", far, "plain", clusterIP, bothPods, own),
		ok("cluster IP from the node", here, "plain", clusterIP, bothPods, here),
		ok("cluster IP from outside is masqueraded", client, "plain", clusterIP, bothPods, here),
		ok("node port from outside is masqueraded", client, "plain", nodePort, bothPods, here),
		ok("node port from a pod", far, "plain", nodePort, bothPods, here),
		ok("node port from the node", here, "plain", nodePort, bothPods, here),
		ok("external IP from outside is masqueraded", client, "plain", externalIP, bothPods, here),
		ok("external IP from a pod", near, "plain", externalIP, bothPods, here),
		ok("external IP from the node", here, "plain", externalIP, bothPods, here),
		ok("load balancer from outside is masqueraded", client, "plain", loadBalancer, bothPods, here),
		ok("load balancer from a pod", near, "plain", loadBalancer, bothPods, here),
		ok("load balancer from the node", here, "plain", loadBalancer, bothPods, here),

		ok("source ranges let their own in", client, "ranges", loadBalancer, bothPods, here),
		second(no(silent, "source ranges drop others", client, "ranges", loadBalancer)),
		no(silent, "source ranges drop pods that are not in them", near, "ranges", loadBalancer),
		no(silent, "source ranges drop the node that is not in them", here, "ranges", loadBalancer),
		second(ok("source ranges say nothing of the node port", client, "ranges", nodePort, bothPods, here)),
		ok("source ranges say nothing of the cluster IP", near, "ranges", clusterIP, bothPods, own),
		ok("a node in the ranges reaches the address that it has itself", here, "own-range", loadBalancer, bothPods, here),
		no(silent, "a node in the ranges lets no other client in", client, "own-range", loadBalancer),

		ok("a pod that asks itself is masqueraded", near, "alone", clusterIP, near, here),
		ok("the other pod is not", far, "alone", clusterIP, near, own),

		ok("policy Local keeps the source at the node port", client, "local", nodePort, near, own),
		ok("policy Local keeps the source at the external IP", client, "local", externalIP, near, own),
		ok("policy Local keeps the source at the load balancer", client, "local", loadBalancer, near, own),
		ok("policy Local takes the node to all endpoints", here, "local", nodePort, bothPods, here),
		ok("policy Local takes pods to all endpoints", near, "local", loadBalancer, bothPods, own),
		ok("policy Local says nothing of the cluster IP", far, "local", clusterIP, bothPods, own),

		no(silent, "policy Local without local endpoint drops at the node port", client, "elsewhere", nodePort),
		no(silent, "policy Local without local endpoint drops at the external IP", client, "elsewhere", externalIP),
		no(silent, "policy Local without local endpoint drops at the load balancer", client, "elsewhere", loadBalancer),
		ok("policy Local without local endpoint takes pods there", near, "elsewhere", loadBalancer, far, own),
		ok("policy Local without local endpoint takes the node there", here, "elsewhere", externalIP, far, here),
		ok("policy Local without local endpoint leaves the cluster IP", near, "elsewhere", clusterIP, far, own),

		ok("internal policy Local stays on the node", far, "inside", clusterIP, near, own),
		no(silent, "internal policy Local without local endpoint drops", near, "inside-elsewhere", clusterIP),
		no(silent, "internal policy Local without local endpoint drops the node's", here, "inside-elsewhere", clusterIP),

		no(refused, "no endpoints: cluster IP refuses pods", near, "nobody", clusterIP),
		no(refused, "no endpoints: cluster IP refuses the node", here, "nobody", clusterIP),
		no(refused, "no endpoints: node port refuses", client, "nobody", nodePort),
		no(refused, "no endpoints: external IP refuses", client, "nobody", externalIP),
		no(refused, "no endpoints: load balancer refuses", client, "nobody", loadBalancer),

		ok("an endpoint that is not ready gets nothing", near, "unready", clusterIP, far, own),
		ok("an endpoint that terminates serves when it is the last", far, "draining", clusterIP, near, own),
	}
}

func TestPackets(t *testing.T) {
	on(t, func(n *node) {
		n.perProtocol("without rules", n.nothingYet)
		n.load(options())
		n.refusals()
		n.perProtocol("with rules", func(t *testing.T, f rules.Family, protocol string) {
			var proved table
			defer func() { proved.log(t) }()
			for _, a := range attempts() {
				n.prove(t, f, protocol, a, &proved)
			}
			for _, by := range []way{clusterIP, nodePort} {
				n.spreads(t, f, protocol, by, &proved)
				n.keepsAffinity(t, f, protocol, by, &proved)
			}
			n.remembersEveryClient(t, f, protocol, &proved)
		})
	})
}

// nothingYet: the network carries packets, and the services do not work yet.
func (n *node) nothingYet(t *testing.T, f rules.Family, protocol string) {
	for _, pod := range []string{near, far} {
		got, err := n.ask(client, 0, protocol, netip.AddrPortFrom(address(pod, f), 8080), patience)
		if diff := cmp.Diff(outcome{answered, pod, own}, got); diff != "" || err != nil {
			t.Fatalf("%s to %s itself: %v\n%s", protocol, pod, err, diff)
		}
	}
	for _, by := range []way{clusterIP, nodePort, externalIP, loadBalancer} {
		if got, err := n.ask(client, 0, protocol, n.destination(t, f, "plain", by, protocol), silence); err != nil || got.End == answered {
			t.Errorf("%s to the %s: %v, %v", protocol, by, got, err)
		}
	}
}

// asks is the number of tries of an attempt that must be answered: most have two
// endpoints.
const asks = 4

// prove makes an attempt that must be answered; refusals makes the others.
func (n *node) prove(t *testing.T, f rules.Family, protocol string, a attempt, proved *table) {
	if a.end != answered {
		return
	}
	t.Run(a.proof+"/"+protocol, func(t *testing.T) {
		to := n.destination(t, f, a.service, a.by, protocol)
		start := time.Now()
		for range asks {
			got, err := n.ask(a.from, a.number, protocol, to, patience)
			if err != nil {
				t.Fatal(err)
			}
			want := outcome{End: answered, By: got.By, Seen: a.seen}
			if !slices.Contains(strings.Fields(a.pods), got.By) {
				want.By = "one of " + a.pods
			}
			if got.By == a.from { // otherwise a place would count its own answer
				want.Seen = here
			}
			a.compare(t, protocol, to, want, got)
		}
		result := fmt.Sprintf("%s by %s, which sees the source %s", a.end, strings.ReplaceAll(a.pods, " ", " or "), a.seen)
		proved.add(a.proof, protocol, a.from, to, result, time.Since(start)/asks)
	})
}

// compare ends the test unless the attempt had the wanted end.
func (a attempt) compare(t *testing.T, protocol string, to netip.AddrPort, want, got outcome) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s from %s to %s, the %s of %s (-want +got):\n%s", protocol, a.from, to, a.by, a.service, diff)
	}
}

// A refusal is an attempt that must not be answered, over one protocol of one family.
type refusal struct {
	attempt
	f        rules.Family
	protocol string
	to       netip.AddrPort
	got      outcome
	err      error
	took     time.Duration
}

// refusals makes the attempts that must not be answered, many at once, because
// each waits. A round has at most one attempt to each destination. So the
// counters of the destination's rules, listed before and after the round, belong
// to that attempt.
func (n *node) refusals() {
	n.Helper()
	var rounds [][]*refusal
	turns := map[string]int{}
	for _, a := range attempts() {
		if a.end == answered {
			continue
		}
		turn := turns[a.service+string(a.by)]
		turns[a.service+string(a.by)]++
		if turn == len(rounds) {
			rounds = append(rounds, nil)
		}
		for _, f := range rules.Families() {
			for _, protocol := range protocols {
				r := &refusal{attempt: a, f: f, protocol: protocol, to: n.destination(n.T, f, a.service, a.by, protocol)}
				rounds[turn] = append(rounds[turn], r)
			}
		}
	}
	var proved table
	defer func() { proved.log(n.T) }()
	before := n.counters()
	for _, round := range rounds {
		var all sync.WaitGroup
		for _, r := range round {
			all.Go(func() { n.attempt(r) })
		}
		all.Wait()
		// A packet may wait longer for its neighbour's address than its sender
		// waits for an answer. On a busy machine the sender's time may be over
		// before it sends.
		var after map[rules.Family]string
		testkit.Until(n.T, "the dropped packets to be counted", func() error {
			after = n.counters()
			for _, r := range round {
				if r.end == silent && r.got.End == silent && r.hits(n.T, after) == r.hits(n.T, before) {
					n.attempt(r)
					return fmt.Errorf("%s rule of %s for %s has counted none", r.target, r.service, r.protocol)
				}
			}
			return nil
		})
		for _, r := range round {
			n.Run(fmt.Sprintf("%s/%s/%s", r.f, r.proof, r.protocol), func(t *testing.T) {
				if r.err != nil {
					t.Fatal(r.err)
				}
				r.compare(t, r.protocol, r.to, outcome{End: r.end}, r.got)
				packets := r.hits(t, after) - r.hits(t, before)
				if packets < 1 || r.end == refused && packets > firstRefused(r.f, r.protocol) {
					t.Fatalf("%s, but the rules of %s with %s have counted %d packets", r.end, r.service, r.target, packets)
				}
				proved.add(r.proof, r.protocol, r.from, r.to, r.end+" by the service's "+r.target, r.took)
			})
		}
		before = after
	}
}

// hits returns the packets counted by the rules that cause the refusal.
func (r *refusal) hits(t *testing.T, all map[rules.Family]string) int {
	t.Helper()
	names := fmt.Sprintf(" -d %s/%d ", r.to.Addr(), r.to.Addr().BitLen())
	if r.by == nodePort {
		names = fmt.Sprintf(" --dport %d ", r.to.Port())
	}
	return hits(t, all[r.f], fmt.Sprintf("packets/%s:%s ", r.service, r.protocol), names, r.target)
}

// firstRefused returns with which packet a client learns of a refusal: normally
// the first. But Linux 6.18 ignores an ICMPv6 error that arrives while connect
// still holds the socket. Between namespaces it arrives so soon, so TCP over IPv6
// fails with its second SYN, a second later. A REJECT rule alone has the same
// effect.
func firstRefused(f rules.Family, protocol string) int {
	if f == rules.IPv6 && protocol == "tcp" {
		return 2
	}
	return 1
}

// answers sends the same question again and again and counts the answering pods.
func (n *node) answers(t *testing.T, protocol string, to netip.AddrPort, clientNumbers ...int) map[string]int {
	t.Helper()
	count := map[string]int{}
	for _, number := range clientNumbers {
		got, err := n.ask(client, number, protocol, to, patience)
		if err != nil || got.End != answered {
			t.Fatalf("%s from client %d to %s: %v, %v", protocol, number, to, got, err)
		}
		count[got.By]++
	}
	return count
}

func (n *node) spreads(t *testing.T, f rules.Family, protocol string, by way, proved *table) {
	proof := string(by) + " without affinity spreads connections"
	t.Run(proof+"/"+protocol, func(t *testing.T) {
		to := n.destination(t, f, "plain", by, protocol)
		start := time.Now()
		count := n.answers(t, protocol, to, make([]int, many)...)
		if count[near] < enough || count[far] < enough {
			t.Fatalf("of %d connections went %v; want at least %d to each", many, count, enough)
		}
		proved.add(proof, protocol, client, to, fmt.Sprintf("%d near, %d far", count[near], count[far]), time.Since(start)/many)
	})
}

func (n *node) keepsAffinity(t *testing.T, f rules.Family, protocol string, by way, proved *table) {
	const times = 20
	proof := string(by) + " with affinity keeps the endpoint"
	t.Run(proof+"/"+protocol, func(t *testing.T) {
		to := n.destination(t, f, "sticky", by, protocol)
		start := time.Now()
		count := n.answers(t, protocol, to, make([]int, times)...)
		if len(count) != 1 {
			t.Fatalf("of %d connections went %v; want all to one", times, count)
		}
		proved.add(proof, protocol, client, to, fmt.Sprintf("%d of %d to one endpoint", times, times), time.Since(start)/times)
	})
}

// remembersEveryClient: each client has an affinity of its own. P(all clients
// happen to get the same endpoint) = 2 / 2^24 = 1e-7; a run of the test takes
// eight such samples.
func (n *node) remembersEveryClient(t *testing.T, f rules.Family, protocol string, proved *table) {
	const proof = "affinity is each client's own"
	t.Run(proof+"/"+protocol, func(t *testing.T) {
		to := n.destination(t, f, "sticky", clusterIP, protocol)
		start := time.Now()
		total := map[string]int{}
		for number := range clients {
			count := n.answers(t, protocol, to, number, number, number)
			if len(count) != 1 {
				t.Fatalf("client %d got %v", number, count)
			}
			for pod := range count {
				total[pod]++
			}
		}
		if len(total) != 2 {
			t.Fatalf("of %d clients went %v; want some to each", clients, total)
		}
		proved.add(proof, protocol, client, to, fmt.Sprintf("%d clients near, %d far", total[near], total[far]), time.Since(start)/(3*clients))
	})
}

// attempt sends the question, and waits as long as the wanted end requires.
func (n *node) attempt(r *refusal) {
	wait := patience
	if r.end == silent {
		wait = silence
	}
	start := time.Now()
	r.got, r.err = n.ask(r.from, r.number, r.protocol, r.to, wait)
	r.took = time.Since(start)
}
