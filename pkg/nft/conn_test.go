package nft

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestAnAnswerThatCameTooLateIsNoOther: a receive fails, so its answer "no such
// chain" stays in the socket. The connection must continue, and must not report
// another object as missing because of that answer.
func TestAnAnswerThatCameTooLateIsNoOther(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		nstest.Command(t, "iptables-nft", "-t", "nat", "-N", "THERE")
		conn, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { conn.Close() }()
		questions := map[string]func() (bool, error){
			"a table":   func() (bool, error) { return conn.HasTable(tableid.IPv4, "nat") },
			"a chain":   func() (bool, error) { return conn.HasChain(tableid.IPv4, "nat", "THERE") },
			"raw chain": func() (bool, error) { _, ok, err := conn.Chain(tableid.IPv4, "nat", "THERE"); return ok, err },
			"a dump": func() (found bool, err error) {
				err = conn.EachChain(tableid.IPv4, func(c Chain) error { found = found || c.Name == "THERE"; return nil })
				return found, err
			},
			"the counter": func() (bool, error) { id, err := conn.Genid(); return id > 0, err },
		}
		for name, ask := range questions {
			if err := conn.conn.SetReadDeadline(time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.HasChain(tableid.IPv4, "nat", "GONE"); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("the receive ended with %v", err)
			}
			if err := conn.conn.SetReadDeadline(time.Time{}); err != nil {
				t.Fatal(err)
			}
			// Opening a new socket may fail at first; until then the result is
			// unknown.
			for range 2 {
				withoutFiles(t, func() {
					if ok, err := ask(); err == nil {
						t.Errorf("%s, while no socket can be had: %t, want an error", name, ok)
					}
				})
			}
			if ok, err := ask(); !ok || err != nil {
				t.Errorf("%s: %t, %v; want true", name, ok, err)
			}
		}
	})
}

// TestTheAskerComesBack: the Asker works again after its socket could not be
// reopened at first.
func TestTheAskerComesBack(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		a, err := OpenAsker()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { a.Close() }()
		var id uint32
		question := []Question{AskGenid(&id)}
		if err := a.Ask(tableid.IPv4, question); err != nil {
			t.Fatal(err)
		}
		// Nothing takes the answer to this question.
		if err := unix.Sendto(a.fd, a.out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			withoutFiles(t, func() {
				if err := a.Ask(tableid.IPv4, question); err == nil {
					t.Error("an old answer is taken for a new one, or no socket is one")
				}
			})
		}
		if err := a.Ask(tableid.IPv4, question); err != nil || id == 0 {
			t.Errorf("with sockets again: %d, %v", id, err)
		}
	})
}

// withoutFiles calls f while this process, which belongs to the test, may open no
// file descriptor.
func withoutFiles(t *testing.T, f func()) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	none := unix.Rlimit{Cur: 0, Max: before.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Fatal(err)
		}
	}()
	f()
}
