package standby

import (
	"errors"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestAHookThatCannotBeShut: the socket accepts nothing any more. Shut must close it, and so delete
// the open table.
func TestAHookThatCannotBeShut(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		conn, err := nft.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		s, err := Dial(Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		c, err := Translate(sourceOf(map[string][]nft.Rule{"KUBE-SERVICES": {listOf(verdictOf(nfAccept))}}), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Put(c); err != nil {
			t.Fatal(err)
		}
		id := tableid.IPv4.Table("nat")
		if err := s.Open(id, c.Hooks(), nil); err != nil {
			t.Fatal(err)
		}
		// The kernel keeps the socket under another number: writing to s.fd fails from now on.
		aside, err := unix.Dup(s.fd)
		if err != nil {
			t.Fatal(err)
		}
		null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Dup3(null, s.fd, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(unix.Close(null), s.Shut(id)); err == nil {
			t.Error("a hook was shut over a socket that is none")
		}
		if there, err := conn.HasTable(id.Family, TableName); !there || err != nil {
			t.Errorf("the table stands while the socket does: %t, %v", there, err)
		}
		if err := s.Put(c); !errors.Is(err, net.ErrClosed) || s.Status(id).Built {
			t.Errorf("the Standby goes on: %v", err)
		}
		if err := unix.Close(aside); err != nil {
			t.Fatal(err)
		}
		for there := true; there; {
			if there, err = conn.HasTable(id.Family, TableName); err != nil {
				t.Fatal(err)
			}
		}
	})
}
