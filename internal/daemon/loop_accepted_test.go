package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// accepted returns the removals of the status as text.
func (r *rig) accepted() (list []string) {
	for _, a := range r.d.Status().Accepted {
		text := a.String()
		if r.d.cfg.Kernel.Info().Backend == iptables.NFT {
			text += " by " + a.ByText()
		}
		list = append(list, text)
	}
	return list
}

// by appends the process of the Fake, which only nft reveals.
func by(backend iptables.Backend, texts []string) (list []string) {
	for _, text := range texts {
		if backend == iptables.NFT {
			text += " by pid 4242 (iptables -F)"
		}
		list = append(list, text)
	}
	return list
}

// TestWhatIsAcceptedIsSaid: an owner may empty some of its chains, and an operator may empty
// his own. canaryd puts nothing back. It reports the removal once in the log, and in the status
// for an hour.
func TestWhatIsAcceptedIsSaid(t *testing.T) {
	for i, test := range []struct {
		name  string
		table rules.TableName
		first []string // rules that an operator wrote before
		chain string   // the flushed chain
		lines []string
		want  []string
	}{
		{name: "DOCKER-USER, which is the operator's", table: rules.Filter, chain: "DOCKER-USER", first: []string{"-A DOCKER-USER -s 192.0.2.0/24 -j DROP", "-A DOCKER-USER -j RETURN"}, want: []string{"ipv4 filter DOCKER-USER lost 2 rules, 0 left"}},
		{name: "Docker's published ports", table: rules.Nat, chain: "DOCKER", want: []string{"ipv4 nat DOCKER lost one rule, 0 left"}},
		{name: "libvirt's", table: rules.Filter, chain: "LIBVIRT_FWI", want: []string{"ipv4 filter LIBVIRT_FWI lost 2 rules, 0 left"}},
		{
			name: "a network's masquerade", table: rules.Nat, lines: []string{"-D POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"},
			want: []string{"ipv4 nat POSTROUTING lost -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"},
		},
		{name: "one rule of several", table: rules.Filter, lines: []string{"-D DOCKER-FORWARD -i docker0 -j ACCEPT"}},
	} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := run(t, ownersFake(t, backend), ownersSetup)
			r.write(test.table, test.first...)
			r.settled()
			if len(test.chain) > 0 {
				must(t, r.fake.Flush(rules.IPv4, test.table, test.chain))
			} else {
				r.write(test.table, test.lines...)
			}
			left := r.tables()
			r.settled()
			r.after(2 * time.Second)
			if d := cmp.Diff(by(backend, test.want), r.accepted()); d != "" {
				t.Errorf("%s (-want +got):\n%s", test.name, d)
			}
			for _, a := range r.d.Status().Public().Accepted {
				if a.Rule != "" || a.By != nil && a.By.Command != "" {
					t.Errorf("%s: other users read %q, %+v", test.name, a.Rule, a.By)
				}
			}
			const line = "takes this for their owner's decision"
			if n := strings.Count(r.log.String(), line); n != len(test.want) {
				t.Errorf("%s: the log has it %d times, want %d", test.name, n, len(test.want))
			}
			r.after(20 * time.Second)
			r.wantReady()
			r.wantNoFlush()
			r.wantTables(left, left)
			if i > 0 {
				return // the status forgets all cases alike
			}
			r.after(time.Hour)
			if got := r.accepted(); len(got) > 0 {
				t.Errorf("%s: after an hour the status has %q", test.name, got)
			}
		})
	}
}

// TestWhatIsAcceptedAgainIsCounted: kube-proxy adds and deletes rejects as endpoints change.
// The log has the first removal, and the status counts all.
func TestWhatIsAcceptedAgainIsCounted(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		for i := range 3 {
			r.write(rules.Filter, "-F KUBE-SERVICES", fmt.Sprintf("-A KUBE-SERVICES -d 10.96.0.%d/32 -j REJECT", 100+i))
			r.settled()
			r.write(rules.Filter, "-F KUBE-SERVICES")
			r.settled()
			r.after(2 * time.Second)
		}
		list := r.d.Status().Accepted
		if n := strings.Count(r.log.String(), "takes this for their owner's decision"); n != 1 || len(list) != 1 || list[0].Rules < 3 {
			t.Errorf("the log has it %d times, and the status %v", n, list)
		}
	})
}

// TestACleanupIsSaid: kube-proxy --cleanup takes most of the tables.
func TestACleanupIsSaid(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		var lines []string
		for _, rule := range r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")[1:] {
			lines = append(lines, "-D KUBE-SERVICES "+rule)
		}
		r.write(rules.Nat, lines...)
		r.settled()
		r.after(2 * time.Second)
		r.wantNoFlush()
		want := fmt.Sprintf("ipv4 nat KUBE-SERVICES lost %d rules, 1 left", len(lines))
		if list := r.accepted(); len(list) != 1 || !strings.HasPrefix(list[0], want) {
			t.Errorf("the status has %q, want %q", list, want)
		}
	})
}

// TestARemovalInStepsIsSaid: a script deletes all rules of chains but the first, three at a
// time. canaryd learns each step by itself. No step is a large part of its chain or of the
// table.
func TestARemovalInStepsIsSaid(t *testing.T) {
	for _, test := range []struct {
		chains string // prefix of their names
		want   string
	}{
		{"KUBE-SERVICES", "ipv4 nat KUBE-SERVICES lost "},
		{"KUBE-", "ipv4 nat lost "},
	} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := start(t, backend, setup{})
			var lines []string
			for _, c := range r.tables()[rules.IPv4][rules.Nat].Chains {
				if list := r.chain(rules.IPv4, rules.Nat, c.Name); strings.HasPrefix(c.Name, test.chains) && len(list) > 1 {
					for _, rule := range list[1:] {
						lines = append(lines, "-D "+c.Name+" "+rule)
					}
				}
			}
			for step := range slices.Chunk(lines, 3) {
				r.write(rules.Nat, step...)
				r.settled()
				r.after(2 * time.Second)
			}
			list := r.accepted()
			if !slices.ContainsFunc(list, func(text string) bool {
				return strings.HasPrefix(text, test.want) && (backend == iptables.Legacy || strings.Contains(text, " by likely pid 4242"))
			}) {
				t.Errorf("%s, %d rules: the status has %q, want %q", test.chains, len(lines), list, test.want)
			}
		})
	}
}

// TestWhatIsAcceptedOfNativeTablesIsSaid: an owner may empty chains and sets of its tables.
// canaryd puts nothing back, and reports the removal, unless the process is known to be the
// owner.
func TestWhatIsAcceptedOfNativeTablesIsSaid(t *testing.T) {
	calicoTable := tableid.IPv4.Table("calico")
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
		want []string
		log  string
	}{
		{"nothing much", func(k *fakeNative) { k.removeRule(calicoTable) }, nil, ""},
		{"a chain", func(k *fakeNative) { k.flushChain(calicoTable, "services") }, []string{"table ip calico services lost 12 rules, 0 left"},
			`"Rules were removed; canaryd takes this for their owner's decision, and does not put them back" table="ip calico" chain="services" gone=12`},
		{"a map", func(k *fakeNative) { k.flushSet(calicoTable, "jumps") }, []string{"table ip calico jumps lost 3 elements, 0 left"},
			`"Elements of a set were removed; canaryd takes this for their owner's decision, and does not put them back" table="ip calico" set="jumps" gone=3`},
	} {
		t.Run(test.name, func(t *testing.T) {
			calico := tableOf(calicoTable, strings.Split("abcdefghijkl", "")...)
			calico.Sets = []native.Set{{Name: "jumps", Elements: []native.Element{{1}, {2}, {3}}}}
			nativeNode(t, setup{guarded: newFakeNative(calico)}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(k)
				r.after(10 * time.Second)
				r.wantReady()
				r.wantNoFlush()
				var want []string
				for _, text := range test.want {
					want = append(want, text+" by pid 4242 (nft flush)")
				}
				if diff := cmp.Diff(want, r.accepted()); diff != "" {
					t.Errorf("the status says (-want +got):\n%s", diff)
				}
				r.wantLog(test.log)
				r.after(time.Hour)
				if got := r.accepted(); len(got) > 0 {
					t.Errorf("an hour later the status says %q", got)
				}
			})
		})
	}
}
