package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// rawLines returns rules of NodeLocal DNS in raw, and a chain of another owner.
func rawLines(ip string) []string {
	return []string{
		"-A PREROUTING -d " + ip + "/32 -p udp -j NOTRACK", "-A PREROUTING -d " + ip + "/32 -p tcp -j NOTRACK",
		"-A PREROUTING -j cali-PREROUTING", "-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -j ACCEPT",
	}
}

// TestATableThatIsNotGuarded: canaryd restores nothing in raw or security. Log, status and
// metric report the losses of a flush once, with or without protected rules. An owner's
// rewrite, its timely return and its partial removal are not reported.
func TestATableThatIsNotGuarded(t *testing.T) {
	flush := func(r *rig, tables ...rules.TableName) {
		for _, table := range tables {
			must(r.t, r.fake.As(11, "iptables").Flush(rules.IPv4, table, ""))
		}
	}
	write := func(r *rig, lines ...string) {
		must(r.t, r.fake.As(22, "node-cache").RestoreNoflush(rules.IPv4, section(rules.Raw, lines...)))
	}
	for _, c := range []struct {
		name string
		do   func(r *rig)
		gone int
		by   uint32
	}{
		{name: "flushed alone", do: func(r *rig) { flush(r, rules.Raw) }, gone: 4, by: 11},
		{name: "flushed with all others", do: func(r *rig) { flush(r, append(protect.Always(), rules.Raw)...) }, gone: 4, by: 11},
		{name: "flushed before all others", do: func(r *rig) { flush(r, append([]rules.TableName{rules.Raw}, protect.Always()...)...) }, gone: 4, by: 11},
		{name: "its built-in chain flushed", do: func(r *rig) { must(r.t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Raw, "PREROUTING")) }, gone: 3, by: 11},
		{name: "its owner writes it again", do: func(r *rig) { flush(r, rules.Raw); r.after(time.Second); write(r, rawLines("169.254.20.10")...) }},
		{name: "its owner writes others", do: func(r *rig) {
			write(r, append([]string{"-F PREROUTING", "-F cali-PREROUTING"}, rawLines("169.254.20.11")...)...)
		}},
		{name: "its owner removes one", do: func(r *rig) { write(r, "-D PREROUTING -d 169.254.20.10/32 -p tcp -j NOTRACK") }},
		{name: "its owner leaves", do: func(r *rig) {
			for _, line := range rawLines("169.254.20.10") {
				write(r, "-D"+line[2:])
			}
		}, gone: 4, by: 22},
	} {
		t.Run(c.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				fake := loadedFake(t, backend)
				must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Raw, append([]string{":cali-PREROUTING - [0:0]"}, rawLines("169.254.20.10")...)...)))
				r := run(t, fake, setup{})
				r.settled()
				r.after(20 * time.Second)
				moved := r.moved(func() {
					c.do(r)
					r.after(20 * time.Second)
				}, "flushed_unprotected")
				if got := moved["flushed_unprotected_rules_total{family=ipv4,table=raw}"]; got != float64(c.gone) {
					t.Errorf("%v rules of raw were counted, want %d", got, c.gone)
				}
				var want []api.Accepted
				if c.gone > 0 {
					want = []api.Accepted{{Family: rules.IPv4, Table: rules.Raw, Rules: c.gone, Left: 4 - c.gone, NotGuarded: true}}
				}
				got := r.d.Status().Accepted
				for i, a := range got {
					if by := a.By; backend == iptables.NFT && (by == nil || by.PID != c.by) {
						t.Errorf("it was %+v, not pid %d", by, c.by)
					}
					got[i].Time, got[i].By, got[i].Likely = time.Time{}, nil, false
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("the status has (-want +got):\n%s", d)
				}
				if n := strings.Count(r.log.String(), `"Rules are gone from an unguarded table, and canaryd does not put them back; only their owner can write them again" table="ipv4 raw" gone=`); n != len(want) {
					t.Errorf("the log has it %d times", n)
				}
				r.wantReady()
			})
		})
	}
}
