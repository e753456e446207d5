package standby_test

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

var nat = tableid.IPv4.Table("nat")

// kube reports whether these tests protect a chain.
func kube(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }

// dial opens a connection for a test.
func dial(t testing.TB) *nft.Conn {
	t.Helper()
	conn, err := nft.Dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// restore replaces a table's rules by rules in the form of iptables-save.
func restore(t testing.TB, family tableid.Family, text string) {
	t.Helper()
	program := "iptables-nft-restore"
	if family == tableid.IPv6 {
		program = "ip6tables-nft-restore"
	}
	c := exec.Command(program)
	c.Stdin = strings.NewReader(text)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s\n%s", program, err, out, text)
	}
}

// source reads the table to be copied.
func source(t testing.TB, conn *nft.Conn, id tableid.TableID) standby.Source {
	t.Helper()
	raw, found, err := conn.RawTable(id)
	if err != nil || !found {
		t.Fatalf("table %s: found %t, %v", id, found, err)
	}
	return standby.Source{RawTable: raw, Protects: kube}
}

// translate makes a copy, and ends the test if there is none.
func translate(t testing.TB, src standby.Source, before *standby.Copy) *standby.Copy {
	t.Helper()
	c, err := standby.Translate(src, before)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// open opens a Standby for a test.
func open(t testing.TB, cfg standby.Config) *standby.Standby {
	t.Helper()
	s, err := standby.Dial(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// must ends the test if there is an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// random matches text that differs from run to run: the secret of knocks, and how long a gate stays
// open.
var random = regexp.MustCompile(`(@th,64,128 )0x[0-9a-f]+([0-9a-f]{2} )|( expires) \S+`)

// listed returns nft's list of the copy's table, without the owner's name and random text.
func listed(t *testing.T, id tableid.TableID) string {
	t.Helper()
	text := nstest.Command(t, "nft", "list", "table", id.Family.NFT(), standby.NameOf(id))
	first, rest, _ := strings.Cut(text, "\n")
	first, _, _ = strings.Cut(first, " #")
	return first + "\n" + random.ReplaceAllString(rest, "${1}${2}${3}")
}

// drop deletes a table, at a hundredth of the cost of an execution of nft.
func drop(t testing.TB, id tableid.TableID) {
	t.Helper()
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_DELTABLE, 0, id.Family)
	b.Text(unix.NFTA_TABLE_NAME, id.Name)
	b.End()
	b.Finish()
	must(t, b.Send())
}
