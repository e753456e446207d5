package standby

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// Deaf runs f while the socket accepts nothing. The kernel keeps the socket with its tables.
func (s *Standby) Deaf(t *testing.T, f func()) {
	t.Helper()
	aside, err := unix.Dup(s.fd)
	if err != nil {
		t.Fatal(err)
	}
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Dup3(null, s.fd, unix.O_CLOEXEC), unix.Close(null)); err != nil {
		t.Fatal(err)
	}
	f()
	if err := errors.Join(unix.Dup3(aside, s.fd, unix.O_CLOEXEC), unix.Close(aside)); err != nil {
		t.Fatal(err)
	}
}

// TestATableThatCannotBeRemoved: a built or half built table cannot be removed. Remove must return
// an error, and try again. A new build must remove the table first, and must not take it for
// another process's.
func TestATableThatCannotBeRemoved(t *testing.T) {
	id := tableid.IPv4.Table("nat")
	for name, build := range map[string]func(*Standby, *Copy) error{
		"built": (*Standby).Put,
		"half built": func(s *Standby, c *Copy) error {
			more, err := s.PutPiece(c)
			if err == nil && !more {
				err = errors.New("it was built in one step")
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				conn, err := nft.Dial()
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				s, err := Dial(Config{Piece: 1})
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				c, err := Translate(sourceOf(map[string][]nft.Rule{"KUBE-SERVICES": {listOf(verdictOf(nfAccept))}}), nil)
				if err != nil {
					t.Fatal(err)
				}
				there := func(want bool) {
					t.Helper()
					if there, err := conn.HasTable(id.Family, TableName); there != want || err != nil {
						t.Errorf("there is a table: %t, %v, want %t", there, err, want)
					}
				}
				left := func() {
					t.Helper()
					if err := build(s, c); err != nil {
						t.Fatal(err)
					}
					s.Deaf(t, func() {
						for range 2 {
							if err := s.Remove(id); err == nil {
								t.Error("a table was removed over a socket that takes nothing")
							}
						}
						if _, err := s.PutPiece(c); err == nil || errors.Is(err, ErrTaken) {
							t.Errorf("building it again: %v", err)
						}
					})
					there(true)
				}
				left()
				if err := s.Remove(id); err != nil {
					t.Fatal(err)
				}
				there(false)
				left()
				if err := s.Put(c); err != nil || !s.Status(id).Built {
					t.Errorf("it cannot be built again: %v", err)
				}
				if err := s.Remove(id); err != nil {
					t.Fatal(err)
				}
				there(false)
			})
		})
	}
}
