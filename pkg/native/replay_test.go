package native_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// partial has flushes of parts of a table with 100 services. The lost parts are put back into the
// present table.
var partial = []struct{ name, script string }{
	{"flush table", "flush table ip kube-proxy"},
	{"flush chain of a base chain", "flush chain ip kube-proxy nat-prerouting"},
	{"flush chain", "flush chain ip kube-proxy services"},
	{"flush map", "flush map ip kube-proxy service-ips"},
	{"flush several", "flush map ip kube-proxy service-ips; flush set ip kube-proxy cluster-ips; flush chain ip kube-proxy services"},
	{"delete a base chain", "flush chain ip kube-proxy nat-prerouting; delete chain ip kube-proxy nat-prerouting"},
	{"flush table, and another rule takes a name", "flush table ip kube-proxy; add chain ip kube-proxy new; add rule ip kube-proxy new tcp dport { 1, 2 } accept"},
}

func TestWhatATableLostIsPutBack(t *testing.T) {
	text := services(t, services100)
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		for _, p := range partial {
			t.Run(p.name, func(t *testing.T) {
				nstest.Command(t, "nft", "flush", "ruleset")
				nstest.CommandInput(t, text, "nft", "-f", "-")
				putsBack(t, conn, p.script)
			})
		}
	})
}

// putsBack runs a script of nft and puts back the parts that it took from kube-proxy's table.
func putsBack(t *testing.T, conn *nft.Conn, script string) {
	t.Helper()
	id := tableid.IPv4.Table("kube-proxy")
	was := capture(t, conn).Tables[id]
	nstest.CommandInput(t, script, "nft", "-f", "-")
	now := capture(t, conn)
	lost := native.Diff(was, now.Tables[id])
	if len(lost) == 0 {
		t.Fatal("the flush changed nothing")
	}
	b := nft.NewBatch()
	b.Guard(now.Genid)
	if _, err := was.Refill(b, now.Tables[id], native.Options{}); err != nil {
		t.Fatal(err)
	}
	b.Finish()
	if err := b.Send(); err != nil {
		t.Fatalf("%v, after %v", err, lost)
	}
	for _, c := range changes(t, conn, was) {
		if c.Made && c.Name == "new" { // added by the test
			continue
		}
		// A base chain that was deleted is behind the others.
		t.Errorf("%s: afterwards %v; it had lost %v", script, c, lost)
	}
}

// TestARefillLeavesTheOwnersWord: the owner deletes elements and a chain's rules, and then a flush
// empties another chain. The refill must put back only the flushed chain.
func TestARefillLeavesTheOwnersWord(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		was, id := stage(t, conn, kubeProxy)
		nstest.CommandInput(t, `delete element ip kube-proxy service-ips { 172.30.0.2 . 53 }
			flush chain ip kube-proxy service-B/dns
			delete element ip kube-proxy cluster-ips { 172.30.0.2 }`, "nft", "-f", "-")
		nstest.CommandInput(t, "flush chain ip kube-proxy services", "nft", "-f", "-")
		now := capture(t, conn)
		b := nft.NewBatch()
		b.Guard(now.Genid)
		if _, err := was.Refill(b, now.Tables[id], native.Options{}); err != nil {
			t.Fatal(err)
		}
		b.Finish()
		if err := b.Send(); err != nil {
			t.Fatal(err)
		}
		is := capture(t, conn).Tables[id]
		if len(is.Chain("services").Rules) == 0 {
			t.Error("the flushed chain is still empty")
		}
		if got := native.Diff(now.Tables[id], is); len(got) != 1 {
			t.Errorf("the refill did more: %v", got)
		}
		repair := native.Repair{Remedy: native.ByRefill, Want: was, Now: now.Tables[id]}
		if !repair.Repaired(is, false) {
			t.Error("what the refill wrote is not taken for a repair")
		}
		if repair.Repaired(now.Tables[id], false) {
			t.Error("a table that still lacks a flushed chain is taken for repaired")
		}
	})
}

// TestTheCorpusIsRefilled: "flush table" and a flush of every set empty the corpus. A refill must
// put everything back.
func TestTheCorpusIsRefilled(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		loadCorpus(t)
		refilled(t, dial(t))
	})
}

func refilled(t *testing.T, conn *nft.Conn) {
	t.Helper()
	before, was := listedTables(t, "-s"), capture(t, conn)
	var script strings.Builder
	for id, table := range was.Tables {
		name := id.Family.NFT() + " " + id.Name
		script.WriteString("flush table " + name + "\n")
		for i := range table.Sets {
			s, what := &table.Sets[i], "set "
			if s.Flags&unix.NFT_SET_MAP != 0 {
				what = "map "
			}
			if !s.Anonymous() && s.Flags&unix.NFT_SET_OBJECT == 0 { // nft 1.0.6 cannot flush those
				script.WriteString("flush " + what + name + " " + s.Name + "\n")
			}
		}
	}
	nstest.CommandInput(t, script.String(), "nft", "-f", "-")
	now := capture(t, conn)
	b := nft.NewBatch()
	b.Guard(now.Genid)
	for id, table := range was.Tables {
		if _, err := table.Refill(b, now.Tables[id], native.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	b.Finish()
	if err := b.Send(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, listedTables(t, "-s")); diff != "" {
		t.Errorf("nft lists (-before +after):\n%.4000s", diff)
	}
	again := capture(t, conn)
	for id, table := range was.Tables {
		if changes := native.Diff(table, again.Tables[id]); len(changes) > 0 {
			t.Errorf("%s: %v", id, changes)
		}
	}
}

// TestARehearsalChangesNothing: a rehearsal must not change the genid, and must report an
// expression that the kernel refuses.
func TestARehearsalChangesNothing(t *testing.T) {
	text := services(t, services100)
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, text, "nft", "-f", "-")
		conn := dial(t)
		was := capture(t, conn)
		table := was.Tables[tableid.IPv4.Table("kube-proxy")]
		if err := table.Rehearse(); err != nil {
			t.Fatal(err)
		}
		if genid, err := conn.Genid(); err != nil || genid != was.Genid {
			t.Errorf("the genid moved from %d to %d, %v", was.Genid, genid, err)
		}
		sameRaw(t, was, capture(t, conn))
		// This is an expression of another kernel.
		other := *table
		other.Chains = append([]native.Chain(nil), table.Chains...)
		unknown := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "fromthefuture", 1)
		list := nft.AppendAttr(nil, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, unknown, 0)
		other.Chains[0].Rules = []native.Rule{{Attrs: nft.AppendAttr(nil, unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, list, 0)}}
		var refused *native.UnreplayableError
		if err := other.Rehearse(); !errors.As(err, &refused) || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), other.Chains[0].Name) {
			t.Errorf("got %v, want that the kernel refuses the rule", err)
		}
		// A replay of that table must write nothing.
		nstest.Command(t, "nft", "flush", "ruleset")
		b := nft.NewBatch()
		if _, err := other.Create(b, native.Options{}); err != nil {
			t.Fatal(err)
		}
		b.Finish()
		if err := b.Send(); err == nil {
			t.Error("the kernel took an unknown expression")
		}
		if now := capture(t, conn); len(now.Tables) != 0 {
			t.Errorf("%d tables after a refused replay", len(now.Tables))
		}
	})
}

// TestAReplayIsGuarded: a replay must not write into an existing table, nor at a stale genid.
func TestAReplayIsGuarded(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		nstest.CommandInput(t, "table ip t { chain c { accept; }; }", "nft", "-f", "-")
		was := capture(t, conn)
		table := was.Tables[tableid.IPv4.Table("t")]
		send := func(genid uint32, write func(*nft.Batch, native.Options) ([]string, error)) error {
			b := nft.NewBatch()
			b.Guard(genid)
			if _, err := write(b, native.Options{}); err != nil {
				t.Fatal(err)
			}
			b.Finish()
			return b.Send()
		}
		var refused *nft.RefusedError
		if err := send(was.Genid, table.Create); !errors.As(err, &refused) || !errors.Is(err, unix.EEXIST) {
			t.Errorf("onto a standing table: %v", err)
		}
		if err := send(was.Genid, table.Replace); err != nil {
			t.Errorf("in the place of a standing table: %v", err)
		}
		nstest.Command(t, "nft", "flush", "ruleset")
		if err := send(was.Genid, table.Create); !errors.Is(err, nft.ErrStale) {
			t.Errorf("with an old genid: %v", err)
		}
	})
}

// TestTimeoutsGoOn: elements must come back with the rest of their timeouts, and not at all if no
// rest is left.
func TestTimeoutsGoOn(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		nstest.CommandInput(t, "table ip t { set s { type ipv4_addr; timeout 1h; elements = { 10.0.0.1, 10.0.0.2 expires 30m, 10.0.0.3 expires 10m }; }; }", "nft", "-f", "-")
		was := capture(t, conn)
		nstest.Command(t, "nft", "flush", "ruleset")
		was.At = was.At.Add(-20 * time.Minute)
		replay(t, conn, was)
		got := nstest.Command(t, "nft", "list", "ruleset")
		for _, want := range []string{"10.0.0.1 expires 39m5", "10.0.0.2 expires 9m5"} {
			if !strings.Contains(got, want) {
				t.Errorf("no %q in\n%s", want, got)
			}
		}
		if strings.Contains(got, "10.0.0.3") {
			t.Errorf("an element whose time is over came back:\n%s", got)
		}
		if changes := changes(t, conn, was.Tables[tableid.IPv4.Table("t")]); len(changes) != 0 {
			t.Errorf("the proof: %v", changes)
		}
	})
}

// TestTheWitnessIsPlanted: a witness has the nonce in its comment, and a flush deletes it.
func TestTheWitnessIsPlanted(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		plant := func(family tableid.Family, nonce string) error {
			b := nft.NewBatch()
			if err := native.PlantWitness(b, family, nonce); err != nil {
				t.Fatal(err)
			}
			b.Finish()
			return b.Send()
		}
		for _, family := range []tableid.Family{tableid.IPv4, tableid.IPv6, tableid.Inet} {
			if err := plant(family, "nonce-of-"+family.String()); err != nil {
				t.Fatal(err)
			}
		}
		if err := plant(tableid.IPv4, "another"); !errors.Is(err, unix.EEXIST) {
			t.Errorf("a second witness: %v", err)
		}
		nstest.Command(t, "nft", "flush", "ruleset", "ip")
		for family, want := range map[tableid.Family]string{tableid.IPv4: "", tableid.IPv6: "nonce-of-ipv6", tableid.Inet: "nonce-of-inet"} {
			if got, err := native.FindWitness(conn, family); err != nil || got.Nonce != want {
				t.Errorf("%s: %+v, %v", family, got, err)
			}
		}
		if got := nstest.Command(t, "nft", "list", "table", "inet", "canaryd-witness"); !strings.Contains(got, `comment "nonce-of-inet"`) {
			t.Errorf("nft shows\n%s", got)
		}
	})
}

// TestSetsOfIntervalsThatRunOut: a set with intervals and timeouts must come back. An interval that
// has expired meanwhile must come back with neither end.
func TestSetsOfIntervalsThatRunOut(t *testing.T) {
	sets := map[string]string{
		"the set's timeout":        "set s { type ipv4_addr; flags interval,timeout; timeout 1h; elements = { 192.0.2.0/24, 198.51.100.7 expires 10m, 203.0.113.0-203.0.113.9 }; }",
		"the elements' timeouts":   "set s { type ipv4_addr; flags interval,timeout; elements = { 192.0.2.0/24 timeout 1h, 198.51.100.0/24, 203.0.113.0/24 timeout 2h expires 10m }; }",
		"intervals that adjoin":    "set s { type inet_service; flags interval,timeout; timeout 1h; elements = { 0-9, 10-19 expires 10m, 20-65535 }; }",
		"to the end of the range":  "set s { type ipv4_addr; flags interval,timeout; timeout 1h; elements = { 10.0.0.0/8 expires 10m, 128.0.0.0/1 }; }",
		"merged, with counters":    "set s { type ipv6_addr; flags interval,timeout; timeout 1d; auto-merge; counter; elements = { 2001:db8::/32, 2001:db8:1::/48, fe80::/10 expires 10m }; }",
		"of several fields":        "set s { type ipv4_addr . inet_service; flags interval,timeout; timeout 1h; elements = { 192.0.2.0/24 . 80-90, 198.51.100.0/24 . 443 expires 10m }; }",
		"a map":                    "map s { type ipv4_addr : verdict; flags interval,timeout; timeout 1h; elements = { 192.0.2.0/24 : drop, 198.51.100.0/24 expires 10m : accept }; }",
		"with comments and a rest": "set s { type ipv4_addr; flags interval,timeout; timeout 1h; gc-interval 1m; size 99; elements = { 192.0.2.0/24 comment \"listed\", * timeout 2h }; }",
	}
	id := tableid.Inet.Table("fw")
	for name, set := range sets {
		t.Run(name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				conn := dial(t)
				if !load(t, name, "table inet fw {\n"+set+"\n}\n") {
					return
				}
				before, was := nstest.Command(t, "nft", "-s", "list", "ruleset"), capture(t, conn)
				nstest.Command(t, "nft", "flush", "ruleset")
				replay(t, conn, was)
				if diff := cmp.Diff(before, nstest.Command(t, "nft", "-s", "list", "ruleset")); diff != "" {
					t.Errorf("nft lists (-before +after):\n%s", diff)
				}
				sameRaw(t, was, capture(t, conn))

				nstest.Command(t, "nft", "flush", "ruleset")
				was.At = was.At.Add(-20 * time.Minute)
				replay(t, conn, was)
				if changes := changes(t, conn, was.Tables[id]); len(changes) != 0 {
					t.Errorf("the proof after 20 minutes: %v", changes)
				}
				ends := map[bool]int{}
				for _, e := range capture(t, conn).Tables[id].Sets[0].Elements {
					ends[e.IsEnd()]++
				}
				again := nstest.Command(t, "nft", "list", "ruleset")
				if strings.Contains(again, "expires 9m") || strings.Contains(again, "expires 10m") {
					t.Errorf("an interval whose time is over came back:\n%s", again)
				}
				t.Logf("%d beginnings, %d ends", ends[false], ends[true])
				if ends[true] > ends[false]+1 {
					t.Errorf("%d ends for %d beginnings:\n%s", ends[true], ends[false], again)
				}
			})
		})
	}
}

// TestATablesCommentComesBack: a table was made again without its comment. It must get the comment
// back if its owner has written nothing into it. Else it must keep the owner's content.
func TestATablesCommentComesBack(t *testing.T) {
	const owned = `table ip owned { comment "rules of an owner"
		set s { type ipv4_addr; elements = { 10.0.0.1, 10.0.0.2 } }
		chain c { type filter hook input priority 0; ip saddr @s accept; }
	}`
	id := tableid.IPv4.Table("owned")
	for _, tt := range []struct {
		name, flush string
		remedy      native.Remedy
	}{
		{"bare", "delete table ip owned; add table ip owned", native.ByReplace},
		{"with its chain", "delete table ip owned; table ip owned { chain c { type filter hook input priority 0; }; }", native.ByReplace},
		{"with a rule", "delete table ip owned; table ip owned { chain other { accept; }; }", native.ByRefill},
		{"with an element", "delete table ip owned; table ip owned { set s { type ipv4_addr; elements = { 10.0.0.9 } }; }", native.ByRefill},
		{"with some of its elements", "delete table ip owned; table ip owned { set s { type ipv4_addr; elements = { 10.0.0.1 }; }; }", native.ByRefill},
		{"with its comment", "flush table ip owned", native.ByRefill},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				k, conn := openKernel(t), dial(t)
				nstest.CommandInput(t, owned, "nft", "-f", "-")
				was := capture(t, conn)
				nstest.CommandInput(t, tt.flush, "nft", "-f", "-")
				now := capture(t, conn)
				repair := native.NewRepair(native.ByRefill, was.Tables[id], now.Tables[id], 0)
				if repair.Remedy != tt.remedy {
					t.Fatalf("remedy %v, want %v", repair.Remedy, tt.remedy)
				}
				if _, err := k.Write(now.Genid, []native.Repair{repair}, nil); err != nil {
					t.Fatal(err)
				}
				is := capture(t, conn).Tables[id]
				if !repair.Repaired(is, false) {
					t.Error("the repair is not proved")
				}
				if made := native.Diff(was.Tables[id], is); tt.remedy == native.ByReplace && len(made) > 0 {
					t.Errorf("afterwards %v", made)
				}
				for _, change := range native.Diff(now.Tables[id], is) {
					if change.Lost > 0 || change.Gone {
						t.Errorf("the owner's word is gone: %v", change)
					}
				}
			})
		})
	}
}
