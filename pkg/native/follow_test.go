package native_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// wantFollowed fails unless the followed tables equal a read, byte by byte and in order. It returns
// the number of followed tables.
func wantFollowed(t *testing.T, k *native.Kernel, conn *nft.Conn) (followed int) {
	t.Helper()
	got, err := k.Follow(everything)
	if err != nil {
		t.Fatal(err)
	}
	proof, err := k.Capture(everything)
	if err != nil || len(proof.Drifted) > 0 {
		t.Fatalf("drifted %v, %v", proof.Drifted, err)
	}
	want := capture(t, conn)
	timeless := func(r *native.Ruleset) map[tableid.TableID]*native.Table {
		all := map[tableid.TableID]*native.Table{}
		for id, table := range r.Tables {
			all[id] = table.Timeless()
		}
		return all
	}
	if diff := apart(timeless(want), timeless(got)); diff != "" {
		t.Fatalf("followed (-read +followed):\n%.6000s", diff)
	}
	if diff := apart(timeless(want), timeless(proof)); diff != "" {
		t.Fatalf("a proof (-read +proof):\n%.6000s", diff)
	}
	for id, table := range want.Tables {
		if got.Followed(id) {
			if w := k.FollowedWeight(id); w != table.Weight() {
				t.Fatalf("table %s has the weight %+v, and as followed %+v", id, table.Weight(), w)
			}
			followed++
		}
		if table.Digest() != got.Digest(id) {
			t.Fatalf("table %s has another digest", id)
		}
		if len(native.Diff(table, got.Tables[id])) > 0 {
			t.Fatalf("table %s: %v", id, native.Diff(table, got.Tables[id]))
		}
	}
	return followed
}

// try runs a transaction of nft, and reports whether the kernel accepted it.
func try(t *testing.T, text string) bool {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	return cmd.Run() == nil
}

// TestFollowedIsRead: after each of many random transactions, the table made from notifications
// must equal a read.
func TestFollowedIsRead(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		steps, taken, followed, last := 0, 0, 0, ""
		defer func() {
			if t.Failed() {
				t.Log(last)
			}
		}()
		for seed := range testkit.Size(uint64(2), 3) {
			g := &changer{generator: generator{Rand: rand.New(rand.NewPCG(seed, 17))}}
			nstest.CommandInput(t, "flush ruleset\n"+g.table("one"), "nft", "-f", "-")
			for range 40 {
				text := g.transaction(capture(t, conn).Tables[tableid.Inet.Table("one")])
				if steps++; !try(t, text) {
					continue
				}
				taken++
				last = fmt.Sprintf("seed %d, after\n%s", seed, text)
				followed += wantFollowed(t, k, conn)
			}
		}
		t.Logf("%d transactions, the kernel took %d; after %d the table was followed", steps, taken, followed)
		if taken < steps/3 || followed < taken*3/4 {
			t.Error("too few of them were followed: this shows nothing")
		}
	})
}

// TestCommittedBehindARead: a process commits after a read has ended. canaryd hears of the commit
// before it takes up the read, and must not lose it.
func TestCommittedBehindARead(t *testing.T) {
	for _, test := range []struct {
		name     string
		followed bool // before
	}{{"a table that was followed", true}, {"a table that is new", false}} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				conn, k := dial(t), openKernel(t)
				nstest.CommandInput(t, kubeProxy, "nft", "-f", "-")
				if test.followed {
					wantFollowed(t, k, conn)
				}
				k.AfterCapture(func() {
					k.AfterCapture(nil)
					nstest.Command(t, "nft", "add rule ip kube-proxy services counter")
				})
				r, err := k.Capture(everything)
				if err != nil || len(r.Drifted) > 0 {
					t.Fatalf("drifted %v, %v", r.Drifted, err)
				}
				wantFollowed(t, k, conn)
			})
		})
	}
}

// TestAProofReadsWhatCanChange: a proof must not rely on notifications. Only a set that no process
// can change is not read again.
func TestAProofReadsWhatCanChange(t *testing.T) {
	for _, test := range []struct {
		set  string
		read bool
	}{{"named", true}, {"fixed", true}, {"timed", true}, {"__set0", false}} {
		t.Run(test.set, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				conn, k := dial(t), openKernel(t)
				if _, err := k.Follow(everything); err != nil { // from here on it hears
					t.Fatal(err)
				}
				nstest.CommandInput(t, `table ip t {
					set named { type inet_service; elements = { 1, 2 }; }
					set fixed { type inet_service; flags constant; elements = { 1, 2 }; }
					set timed { type inet_service; flags timeout; elements = { 1, 2 timeout 1h }; }
					chain c { tcp dport { 1, 2 } tcp dport @fixed accept; }
				}`, "nft", "-f", "-")
				wantFollowed(t, k, conn)

				id := tableid.IPv4.Table("t")
				k.Misremember(id, test.set)
				proof, err := k.Capture(everything)
				if err != nil {
					t.Fatal(err)
				}
				elements := 0
				for _, s := range proof.Tables[id].Sets {
					if s.Name == test.set {
						elements = len(s.Elements)
					}
				}
				if read := elements == 2; read != test.read {
					t.Errorf("%d elements, want that they are read: %t", elements, test.read)
				}
				if drifted := len(proof.Drifted) > 0; drifted != (test.read && test.set != "timed") {
					t.Errorf("drifted: %t", drifted)
				}
			})
		})
	}
}

// A changer makes transactions that change a random table.
type changer struct {
	generator
	made int
}

func (g *changer) transaction(now *native.Table) string {
	if now == nil || g.IntN(25) == 0 {
		return g.pick([]string{"", "flush ruleset\n", "add table inet one\ndelete table inet one\n"}) + g.table("one")
	}
	var b strings.Builder
	for range 1 + g.IntN(3) {
		b.WriteString(g.line(now))
		b.WriteByte('\n')
	}
	return b.String()
}

// line returns one change of a table.
func (g *changer) line(now *native.Table) string {
	from := g.IntN(len(g.chains))
	chain := g.chains[from]
	handle := func() string {
		if c := now.Chain(chain); c != nil && len(c.Rules) > 0 {
			return fmt.Sprint(c.Rules[g.IntN(len(c.Rules))].Handle)
		}
		return "1"
	}
	g.made++
	name := fmt.Sprintf("new%d", g.made%7)
	stands := func(name string) bool {
		return now.Chain(name) != nil || slices.ContainsFunc(now.Sets, func(s native.Set) bool { return s.Name == name }) ||
			slices.ContainsFunc(now.Objects, func(o native.Object) bool { return o.Name == name })
	}
	set := g.pick(g.sets)
	lines := []func() string{
		func() string { return "add rule inet one " + chain + " " + g.rule(from) },
		func() string { return "insert rule inet one " + chain + " " + g.rule(from) },
		func() string { return "add rule inet one " + chain + " handle " + handle() + " " + g.rule(from) },
		func() string { return "insert rule inet one " + chain + " handle " + handle() + " " + g.rule(from) },
		func() string { return "replace rule inet one " + chain + " handle " + handle() + " " + g.rule(from) },
		func() string { return "delete rule inet one " + chain + " handle " + handle() },
		func() string { return "flush chain inet one " + chain },
		func() string { return "add chain inet one " + name },
		func() string { return "add rule inet one " + name + " counter jump { tcp dport { 7, 8 } accept; }" },
		func() string { return "flush chain inet one " + name + "\ndelete chain inet one " + name },
		func() string { return "rename chain inet one " + name + " renamed" },
		func() string { return "chain inet one chain0 { policy " + g.pick([]string{"drop", "accept"}) + "; }" },
		func() string { return "add element inet one " + set + " { " + g.several(4, g.address) + " }" },
		func() string { return "delete element inet one " + set + " { " + g.address() + " }" },
		func() string { return "flush set inet one " + set },
		func() string { return "add element inet one vmap0 { " + g.port() + " : accept }" },
		func() string { return "flush map inet one vmap0" },
		func() string { return "add element inet one seen { " + g.address() + " timeout 1h }" },
		func() string {
			return "add set inet one " + name + " { type ipv4_addr . inet_service; flags interval; }"
		},
		func() string {
			return "add element inet one " + name + " { 10.0.0.0/8 . " + g.port() + ", " + g.address() + " . 9500-9600 }"
		},
		func() string { return "delete element inet one " + name + " { 10.0.0.0/8 . " + g.port() + " }" },
		func() string { return "delete set inet one " + name },
		func() string {
			return "add map inet one " + name + " { type inet_service : ipv4_addr; elements = { 1 : 10.0.0.1, * : 10.0.0.2 }; }"
		},
		func() string { return "add counter inet one " + name },
		func() string { return "add quota inet one " + name + " { over " + g.port() + " bytes; }" },
		func() string { return "delete counter inet one " + name },
		func() string { return "delete quota inet one " + name },
		func() string { return "add limit inet one " + name + " { rate " + g.port() + "/second; }" },
		func() string { return "add table inet one" + g.pick([]string{"", " { flags dormant; }"}) },
		func() string { return "flush table inet one" },
	}
	for {
		line := lines[g.IntN(len(lines))]()
		if strings.Contains(line, "handle 1 ") || strings.HasSuffix(line, "handle 1") ||
			strings.Contains(line, " "+name) && !strings.HasPrefix(line, "add") && !stands(name) {
			continue
		}
		return line
	}
}

// TestFollowedCorpus: each file of the corpus is loaded, emptied and deleted while canaryd follows
// it. Tables that canaryd cannot follow are read.
func TestFollowedCorpus(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		read, followed := 0, 0
		for _, file := range corpusFiles(t) {
			name := strings.TrimSuffix(filepath.Base(file), ".nft")
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !load(t, name, "flush ruleset\n"+string(text)) {
				continue
			}
			wantFollowed(t, k, conn)
			ids := slices.Collect(func(yield func(tableid.TableID) bool) {
				for id := range capture(t, conn).Tables {
					if !yield(id) {
						return
					}
				}
			})
			script := ""
			for _, id := range ids {
				script += "delete table " + id.Family.NFT() + " " + id.Name + "\n"
			}
			// After "flush ruleset" the next file is loaded.
			steps := []string{script + string(text), strings.ReplaceAll(script, "delete", "flush"), string(text), "flush ruleset"}
			for _, step := range steps {
				if !try(t, step+"\n") {
					continue
				}
				if n := wantFollowed(t, k, conn); len(ids) > 0 && n == 0 && len(capture(t, conn).Tables) > 0 {
					read++
					t.Logf("%s was read", name)
					break
				}
				followed++
			}
		}
		t.Logf("%d transactions were followed, %d tables were read", followed, read)
		if followed < 240 || read > 12 {
			t.Error("too many tables were read")
		}
	})
}
