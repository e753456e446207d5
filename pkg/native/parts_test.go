package native_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// ownersTables are tables that owners write. accepted has the chains and sets that an unknown
// process may flush alone, because it may be their owner. All others come back.
var ownersTables = []struct {
	name, table string
	accepted    []string
	// others are accepted from a shell, too.
	others []string
	// open has the parts that wait for a decision if the commit was missed. resynced has the parts
	// that are accepted then. All others come back then, too.
	open, resynced []string
}{
	{"kube-proxy", kubeProxy, nil, nil, []string{"cluster-ips"}, []string{"no-endpoint-services"}},
	{"kube-proxy, one service without endpoints", strings.Replace(kubeProxy, "172.30.0.9 . 80 : drop, ", "", 1), []string{"no-endpoint-services"}, nil, []string{"cluster-ips"}, []string{"no-endpoint-services"}},
	{"docker", docker, nil, nil, []string{"nat-prerouting-and-output", "raw-PREROUTING"}, nil},
	{"docker, an unprotected network", strings.Replace(docker, "drop comment \"UNPUBLISHED PORT DROP\"", "accept comment \"UNPROTECTED\"", 1),
		[]string{"nat-prerouting-and-output"}, nil, []string{"nat-prerouting-and-output", "raw-PREROUTING"}, nil},
	{"netavark", netavark, nil, nil, []string{"INPUT", "NETAVARK-HOSTPORT-DNAT", "NETAVARK-ISOLATION-1", "NETAVARK-ISOLATION-2", "NETAVARK-ISOLATION-3"}, nil},
	{"portmap", portmap, nil, nil, []string{"hostports", "hostip_hostports", "masquerading"}, nil},
	{"ipmasq", ipmasq, []string{"masq_checks"}, nil, []string{"masq_checks"}, nil},
	{"libvirt", libvirt, []string{"guest_cross"}, nil, []string{"guest_output", "guest_input", "guest_cross", "guest_nat"}, nil},
	{"calico", calico, []string{"cali-FORWARD", "cali40s-1"}, nil, nil, []string{"cali-FORWARD", "cali40s-1"}},
	{"a table that a word names", word, []string{"fw2", "ours", "banned"}, []string{"fw2", "ours", "banned"}, []string{"input", "fw2", "ours", "banned"}, nil},
}

// TestEachPartFlushedAlone: each chain and each set of each owner's table is flushed, and nothing
// else. It must come back, or be accepted and reported. If the commit was missed, it may wait for a
// decision. A shell's or a script's flush of an owner's table must not be accepted.
func TestEachPartFlushedAlone(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		tables := slices.Clone(ownersTables)
		tables = append(tables, ownersTables[0])
		real := &tables[len(tables)-1]
		real.name, real.table = "kube-proxy, 100 services", services(t, services100)
		real.open, real.resynced = []string{"cluster-ips", "hairpin-connections"}, []string{"no-endpoint-services"}
		for _, owner := range tables {
			t.Run(owner.name, func(t *testing.T) {
				accepted := map[native.Committer][]string{}
				var open, resynced []string
				was, id := stage(t, conn, owner.table)
				parts := partsOf(was)
				for i, part := range parts {
					if i > 0 {
						was, id = stage(t, conn, owner.table)
					}
					genid, err := conn.Genid()
					if err != nil {
						t.Fatal(err)
					}
					heard := listen(t, genid)
					nstest.Command(t, "nft", "flush", part.kind, id.Family.NFT(), id.Name, part.name)
					now := capture(t, conn)
					deeds := heard.upTo(t, now.Genid)
					missed := native.Judge(native.Evidence{Was: was, Now: now.Tables[id], Missed: true, Habits: owners.HabitsOf(id)})
					switch {
					case missed.Open():
						open = append(open, part.name)
					case missed.Verdict == native.Changed:
						resynced = append(resynced, part.name)
						if said := native.LargeRemovals(was, now.Tables[id], nil); len(said) != 1 {
							t.Errorf("%s, missed: said is %+v", part.name, said)
						}
					case missed.Verdict != native.Emptied || missed.Remedy != native.ByRefill:
						t.Errorf("%s, missed: %s", part.name, missed.Verdict)
					}
					for _, by := range []native.Committer{native.UnknownCommitter, native.Shell, native.NotOwner, native.Owner} {
						f, e := flushedBy(was, now.Tables[id], deeds, by)
						switch {
						case f.Verdict == native.Changed && by == native.Owner:
						case f.Verdict == native.Changed:
							accepted[by] = append(accepted[by], part.name)
							if said := native.LargeRemovals(was, e.Now, e.Deeds); len(said) != 1 || said[0].Name != part.name || said[0].By == nil || said[0].Left != 0 {
								t.Errorf("%s: said is %+v", part.name, said)
							}
						case f.Verdict != native.Emptied || by == native.Owner:
							t.Errorf("%s: %s", part.name, f.Verdict)
						case by == native.NotOwner:
							remedied(t, conn, was, now, f)
						}
					}
				}
				t.Logf("%d parts, accepted %v", len(parts), accepted)
				want := map[native.Committer][]string{}
				if owner.accepted != nil {
					want[native.UnknownCommitter] = owner.accepted
				}
				if owner.others != nil {
					want[native.Shell] = owner.others
				}
				unordered := cmpopts.SortSlices(strings.Compare)
				if diff := cmp.Diff([][]string{owner.open, owner.resynced}, [][]string{open, resynced}, unordered); diff != "" {
					t.Errorf("what waits for a decision, and what is accepted, where the commit was missed (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(want, accepted, unordered); diff != "" {
					t.Errorf("what is accepted, by process (-want +got):\n%s", diff)
				}
			})
		}
	})
}

// flushedBy judges a table after one commit of a process of that kind.
func flushedBy(was, now *native.Table, heard []map[tableid.TableID]*native.Deed, by native.Committer) (native.Finding, native.Evidence) {
	e := native.Evidence{Was: was, Now: now, Habits: owners.HabitsOf(was.ID)}
	for _, deeds := range heard {
		if d := deeds[was.ID]; d != nil {
			own := *d
			own.By = by
			e.Deeds = append(e.Deeds, &own)
		}
	}
	return native.Judge(e), e
}

// A tablePart is a chain, set or map with content.
type tablePart struct{ kind, name string }

// partsOf returns the chains and sets of a table that a flush would empty. Of the many chains and
// sets of services it returns two of each kind.
func partsOf(table *native.Table) (parts []tablePart) {
	kinds := map[string]int{}
	add := func(kind, name string) {
		of, _, service := strings.Cut(name, "-")
		if kinds[kind+of]++; !strings.Contains(name, "/") || !service || kinds[kind+of] <= 2 {
			parts = append(parts, tablePart{kind, name})
		}
	}
	for i := range table.Chains {
		if c := &table.Chains[i]; !c.Bound && len(c.Rules) > 0 {
			add("chain", c.Name)
		}
	}
	for i := range table.Sets {
		s := &table.Sets[i]
		if s.Anonymous() || s.Dynamic() || len(s.Elements) == 0 {
			continue
		}
		kind := "set"
		if s.Flags&8 != 0 { // NFT_SET_MAP
			kind = "map"
		}
		add(kind, s.Name)
	}
	return parts
}

// TestAFlushedBlocklistIsSaid: elements with timeouts are no content, because time removes them. A
// commit that takes several and leaves none must be reported anyway. Single deletions must not be
// reported.
func TestAFlushedBlocklistIsSaid(t *testing.T) {
	const table = `table inet fw {
	set banned {
		type ipv4_addr
		flags interval,timeout
		timeout 1h
		elements = { 10.0.0.0/8, 192.0.2.1 }
	}
	set seen {
		type ipv4_addr
		flags timeout
		timeout 1h
		elements = { 192.0.2.1, 192.0.2.2, 192.0.2.3 }
	}
}
`
	for _, test := range []struct {
		command, set string
		took         int
		want         string // empty: nothing is said
	}{
		{"flush set inet fw banned", "banned", 4, "banned: 2 gone, 0 left"},
		{"flush set inet fw seen", "seen", 3, "seen: 3 gone, 0 left"},
		{"delete element inet fw seen { 192.0.2.1 }", "seen", 1, ""},
		{"delete element inet fw seen { 192.0.2.1, 192.0.2.2 }", "seen", 2, ""},
	} {
		t.Run(test.command, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				conn := dial(t)
				id := tableid.Inet.Table("fw")
				read := func() *native.Table {
					t.Helper()
					all, err := native.Capture(conn, func(nft.Table) bool { return true })
					if err != nil {
						t.Fatal(err)
					}
					return all.Tables[id]
				}
				nstest.CommandInput(t, table, "nft", "-f", "-")
				was := read()
				nstest.Command(t, "nft", test.command)
				said := ""
				for _, r := range native.LargeRemovals(was, read(), []*native.Deed{{Elements: map[string]int{test.set: test.took}}}) {
					said += fmt.Sprintf("%s: %d gone, %d left", r.Name, r.Gone, r.Left)
				}
				if said != test.want {
					t.Errorf("said is %q, want %q", said, test.want)
				}
			})
		})
	}
}
