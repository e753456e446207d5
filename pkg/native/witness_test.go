package native_test

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// squat makes a table that belongs to one socket, and returns a function that closes the socket.
func squat(t *testing.T, name string) (leave func()) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	if err != nil {
		t.Fatal(err)
	}
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_NEWTABLE, 0, tableid.IPv4)
	b.Text(unix.NFTA_TABLE_NAME, name)
	b.Number(unix.NFTA_TABLE_FLAGS, 2) // NFT_TABLE_F_OWNER
	b.End()
	b.Finish()
	nstest.Need(t, "tables with an owner, of Linux 5.12 and newer", b.SendFrom(fd))
	return func() { _ = unix.Close(fd) }
}

// TestAnotherProcessHasTheWitnesssName: no flush deletes a table that belongs to a process. So the
// witness must get another name if a process has its name. A flush and a cleanup must find it by
// that name.
func TestAnotherProcessHasTheWitnesssName(t *testing.T) {
	for _, test := range []struct {
		name  string
		squat func(t *testing.T) (leave func())
		stays bool
	}{
		{"it belongs to a process", func(t *testing.T) func() { return squat(t, native.WitnessName) }, true},
		{"it has no nonce", func(t *testing.T) func() {
			nstest.Command(t, "nft", "add", "table", "ip", native.WitnessName)
			return nil
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				leave := test.squat(t)
				k := openKernel(t)
				witness := func(want native.Witness) {
					t.Helper()
					if got, err := k.Witness(tableid.IPv4); err != nil || got != want {
						t.Errorf("the witness is %+v, %v; want %+v", got, err, want)
					}
				}
				plant := func(nonce string) {
					t.Helper()
					genid, err := k.Genid()
					if err == nil {
						_, err = k.Write(genid, nil, map[tableid.Family]string{tableid.IPv4: nonce})
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				hear := func() native.Commit {
					t.Helper()
					genid, err := k.Genid()
					if err != nil {
						t.Fatal(err)
					}
					commits, missed, err := k.Hear(genid)
					if err != nil || missed || len(commits) == 0 {
						t.Fatalf("%d commits, missed %t, %v", len(commits), missed, err)
					}
					return commits[len(commits)-1]
				}
				witness(native.Witness{Taken: true})
				plant("0123456789abcdef")
				ours := native.Witness{Nonce: "0123456789abcdef", Table: native.WitnessName + "-01234567", Taken: true}
				witness(ours)
				nstest.Command(t, "nft", "add", "table", "ip", "kube-proxy")
				if !test.stays {
					nstest.Command(t, "nft", "delete", "table", "ip", native.WitnessName)
					if c := hear(); len(c.WitnessLost) > 0 {
						t.Errorf("the end of the other table is heard as %+v", c)
					}
				} else {
					hear()
				}
				nstest.Command(t, "nft", "flush", "ruleset")
				c := hear()
				if d := c.Deeds[tableid.IPv4.Table("kube-proxy")]; d == nil || !d.Deleted || !d.WitnessLost || !c.WitnessLost[tableid.IPv4] {
					t.Errorf("a flush is heard as %+v, of the table %+v", c, d)
				}
				witness(native.Witness{Taken: test.stays})
				plant("fedcba9876543210")
				if test.stays {
					leave()
					witness(native.Witness{Nonce: "fedcba9876543210", Table: native.WitnessName + "-fedcba98"})
					leave = squat(t, native.WitnessName)
				}
				if err := native.RemoveWitnesses(nft.NewPort()); err != nil {
					t.Error(err)
				}
				if left := nstest.Command(t, "nft", "list", "tables"); strings.Contains(left, native.WitnessName) != test.stays || strings.Contains(left, native.WitnessName+"-") {
					t.Errorf("a cleanup left\n%s", left)
				}
				if test.stays {
					leave()
				}
			})
		})
	}
}
