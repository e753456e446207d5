package main

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// mattering are the flushes of both backends that affect a client most.
const mattering = "nft-flush-ruleset,nft-delete-nat,flush-all,flush-nat,flush-delete-nat,flush-postrouting"

// sparse are the flags of a view whose clients leave time to other tests. Connections and
// requests at a fifth of the rate end in the same ways. Each way begins some 15 patient and 80
// impatient ones around a flush: checkTraffic.
var sparse = []string{"-view", "-ping=40ms", "-patient=25ms", "-impatient=10ms"}

// TestClientsView: through every kind of flush no established connection ends, every patient
// one is answered, and none reaches a pod of another service. Durations are only printed.
func TestClientsView(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		story string
		flags []string
	}{
		{"every kind of flush, 100 services", []string{"-services=100"}},
		{"at 1,000 services", []string{"-services=1000", "-kinds=flush-all,flush-delete-nat"}},
		{"those that matter, with the standby", []string{"-services=100", "-standby=on", "-kinds=" + mattering}},
		{"what the policy of FORWARD drops while filter is empty", []string{"-services=100", "-forward-drop", "-kinds=flush-all,flush-nat,flush-forward"}},
	} {
		t.Run(test.story, func(t *testing.T) {
			for _, r := range soak(t, "", slices.Concat(test.flags, sparse)...) {
				checkTraffic(t, r)
				// On nft the standby may spare every one of them.
				if !slices.Contains(test.flags, "-standby=on") || r.Backend == "legacy" {
					checkGaps(t, r)
				}
			}
		})
	}
}

// checkTraffic fails if clients did too little for a meaningful view.
func checkTraffic(t *testing.T, r result) {
	t.Helper()
	for _, c := range r.View {
		// The limit is for a second and a half on an idle machine.
		if c.Established == 0 || c.Begun < 5*c.Flushes || strings.HasSuffix(c.Way, "TCP") && c.Asked < 20*c.Flushes {
			t.Errorf("%s, %s, %s: only %d established, %d patient and %d impatient connections", r.Backend, c.Flush, c.Way, c.Established, c.Begun, c.Asked)
		}
	}
}

// checkGaps fails if no impatient connection failed.
func checkGaps(t *testing.T, r result) {
	t.Helper()
	failed := 0
	for _, c := range r.View {
		failed += c.Failed
	}
	if failed == 0 {
		t.Errorf("%s: no impatient connection failed in %d flushes: they did nothing", r.Backend, r.Flushes)
	}
}

// TestTheViewSeesWhatIsLost: only a stand-in for kube-proxy's Monitor puts rules back.
// Connections must be lost in each of the ways that fail a canaryd.
func TestTheViewSeesWhatIsLost(t *testing.T) {
	t.Parallel()
	for _, r := range soak(t, "", append([]string{"-healers=monitor", "-services=10", "-poll=1s", "-kinds=flush-delete-all,flush-nat"}, sparse...)...) {
		checkTraffic(t, r)
		checkGaps(t, r)
		seen := map[string]cell{}
		for _, c := range merge(r.View, byWay, cell.withFlushes) {
			seen[c.Way] = c
		}
		for _, way := range []string{"host port, TCP", "node port, TCP"} {
			if c := seen[way]; c.Resets == 0 || c.Refused == 0 {
				t.Errorf("%s, %s: %d resets and %d refused, want some: the node's own stack answers what is not translated", r.Backend, way, c.Resets, c.Refused)
			}
		}
		for _, way := range []string{"cluster IP from a pod, TCP", "cluster IP from outside, UDP", "hairpin, TCP"} {
			if c := seen[way]; c.Never == 0 || !slices.Contains(c.Gaps, neverHealed) && strings.HasSuffix(way, "TCP") {
				t.Errorf("%s, %s: %d never connected and the gaps %v, want some without an end", r.Backend, way, c.Never, c.Gaps)
			}
		}
		r.Healer, r.Strict = byCanaryd, true
		if r.err() == nil {
			t.Errorf("%s: a canaryd whose clients saw that would pass", r.Backend)
		}
	}
}

// TestCells: the results of one way for one flush are counted, and merged over ways and over
// flushes.
func TestCells(t *testing.T) {
	w := window{Kind: "flush-nat", From: 2000, Done: 4000, To: 8000}
	impatient := at(0, "aaaxxxaa")
	seen := wayView{
		Flows:     []flowView{{7000, alive}, {9000, reset}, {8000, dead}, {1000, moved}},
		Patient:   []attempt{{Outcome: answered, Pod: podA}, {Outcome: refused}, {Outcome: silent}, {Outcome: other}, {Outcome: reset}, {Outcome: answered, Pod: podB}},
		Impatient: impatient,
	}
	var c cell
	if strangers := c.add(w, seen, truth{First: [][]netip.Addr{{podA}}}); len(strangers) != 2 {
		t.Errorf("the wrong answers are %q, want the moved flow and one of another pod", strangers)
	}
	const ms = time.Millisecond
	want := cell{
		Flushes: 1, Established: 4, Resets: 3, Stalls: []time.Duration{9 * ms}, Begun: 6, Never: 2, Refused: 1,
		Asked: 8, Failed: 3, Gaps: []time.Duration{4 * ms}, Afters: []time.Duration{2 * ms}, Wrong: 2,
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("one flush (-want +got):\n%s", diff)
	}
	healed := cell{Flushes: 2, Failed: 1, Gaps: []time.Duration{3 * ms, 5 * ms}, Stalls: []time.Duration{ms, ms}}
	open := cell{Flushes: 2, Failed: 2, Gaps: []time.Duration{9 * ms, neverHealed}, Stalls: []time.Duration{0, 2 * ms}}
	none := cell{Flushes: 2, Stalls: []time.Duration{4 * ms, 0}} // UDP
	want = cell{Flushes: 2, Failed: 3, Gaps: []time.Duration{9 * ms, neverHealed}, Stalls: []time.Duration{4 * ms, 2 * ms}}
	if diff := cmp.Diff(want, healed.withWay(open).withWay(none)); diff != "" {
		t.Errorf("three ways (-want +got):\n%s", diff)
	}
	want = cell{Flushes: 4, Failed: 3, Gaps: []time.Duration{3 * ms, 5 * ms, 9 * ms, neverHealed}, Stalls: []time.Duration{ms, ms, 0, 2 * ms}}
	if diff := cmp.Diff(want, healed.withFlushes(open)); diff != "" {
		t.Errorf("four flushes (-want +got):\n%s", diff)
	}
	if got := medianAndWorst(want.Gaps); got != "5 / 9 ms" {
		t.Errorf("median and worst are %q", got)
	}
}

// TestFlow: a flow counts the time between two answers, and knows its end.
func TestFlow(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for _, test := range []struct {
			story, want string
			end         func(c *net.TCPConn)
		}{
			{"a reset", reset, func(c *net.TCPConn) { _ = c.SetLinger(0); _ = c.Close() }},
			{"an end without a reset", reset, func(c *net.TCPConn) { _ = c.Close() }},
			{"another pod", moved, func(c *net.TCPConn) { _, _ = c.Write([]byte("10.0.0.2\n")) }},
		} {
			listener, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var serving sync.WaitGroup
			quiet := make(chan struct{})
			serving.Go(func() {
				c, err := listener.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				question := make([]byte, 1)
				_, _ = c.Write([]byte("10.0.0.1\n"))
				for range 3 {
					_, _ = c.Read(question)
					_, _ = c.Write([]byte("10.0.0.1\n"))
				}
				close(quiet)
				_, _ = c.Read(question)
				testkit.Pass(t, 50*time.Millisecond, "how long the stall lasts")
				test.end(c.(*net.TCPConn))
				_, _ = c.Read(question)
			})
			f, err := openFlow(way{Name: test.story, Network: "tcp4"}, target{At: netip.MustParseAddrPort(listener.Addr().String())}, &pace{wait: time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			f.begin()
			<-quiet
			if f.isLost() {
				t.Errorf("%s: lost before it came", test.story)
			}
			v := f.after(clock() + time.Minute.Microseconds())
			if v.Lost != test.want || v.Stall < 50_000 {
				t.Errorf("%s: %q after a stall of %d us, want %q and 50 ms", test.story, v.Lost, v.Stall, test.want)
			}
			f.close()
			_ = listener.Close()
			serving.Wait()
		}
	})
}

// TestTry: the end of a patient connection, over TCP and UDP.
func TestTry(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		socket, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		var serving sync.WaitGroup
		serving.Go(func() {
			question := make([]byte, 10)
			_, _, _ = socket.ReadFromUDPAddrPort(question) // the first request is lost
			if _, from, err := socket.ReadFromUDPAddrPort(question); err == nil {
				_, _ = socket.WriteToUDPAddrPort([]byte(podA.String()), from)
			}
		})
		at := func(port int) target { return target{At: netip.MustParseAddrPort(fmt.Sprintf("127.0.0.1:%d", port))} }
		open := socket.LocalAddr().(*net.UDPAddr).Port
		tcp, udp := way{Network: "tcp4"}, way{Network: "udp4"}
		if a := udp.try(at(open), 5*time.Second); a.Outcome != answered || a.Pod != podA || a.End-a.Start < askAgain.Microseconds() {
			t.Errorf("who asks again is %s", a)
		}
		serving.Wait()
		_ = socket.Close()
		if a := udp.try(at(open), 300*time.Millisecond); a.Outcome == answered || a.End-a.Start < 200_000 {
			t.Errorf("who is refused over UDP goes on asking: %s", a)
		}
		if a := tcp.try(at(open), time.Second); a.Outcome != refused {
			t.Errorf("who is refused over TCP is %s", a)
		}
		if a := tcp.try(target{At: netip.MustParseAddrPort("127.0.0.1:9"), From: netip.MustParseAddr("127.0.0.5")}, time.Second); a.Outcome != refused {
			t.Errorf("from an address of its own: %s", a)
		}
	})
}
