package iptables

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAnAnswerThatCameTooLateIsNoOther: a receive that fails leaves its answer
// behind, here "no such chain". Nothing else may be called missing for it, and the
// connection goes on.
func TestAnAnswerThatCameTooLateIsNoOther(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -N THERE")
		conn, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { conn.Close() }()
		there := Place{rules.Nat, "THERE"}
		questions := map[string]func() (bool, error){
			"a table":   func() (bool, error) { return conn.HasTable(rules.IPv4, rules.Nat) },
			"a chain":   func() (bool, error) { return conn.HasChain(rules.IPv4, there) },
			"raw chain": func() (bool, error) { _, ok, err := conn.Chain(rules.IPv4, there); return ok, err },
			"a dump": func() (found bool, err error) {
				err = conn.EachChain(rules.IPv4, func(c Chain) error { found = found || c.place == there; return nil })
				return found, err
			},
			"the counter": func() (bool, error) { id, err := conn.Genid(); return id > 0, err },
		}
		for name, ask := range questions {
			if err := conn.conn.SetReadDeadline(time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.HasChain(rules.IPv4, Place{rules.Nat, "GONE"}); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("the receive ended with %v", err)
			}
			if err := conn.conn.SetReadDeadline(time.Time{}); err != nil {
				t.Fatal(err)
			}
			// There may be no new socket at once; until there is, nothing is known.
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

// TestTheAskerComesBack: its socket could not be opened again at once.
func TestTheAskerComesBack(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		a, err := OpenAsker()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { a.Close() }()
		var id uint32
		question := []Question{AskGenid(&id)}
		if err := a.Ask(rules.IPv4, question); err != nil {
			t.Fatal(err)
		}
		// Nobody takes the answer to this one.
		if err := unix.Sendto(a.fd, a.out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			withoutFiles(t, func() {
				if err := a.Ask(rules.IPv4, question); err == nil {
					t.Error("an old answer is taken for a new one, or no socket is one")
				}
			})
		}
		if err := a.Ask(rules.IPv4, question); err != nil || id == 0 {
			t.Errorf("with sockets again: %d, %v", id, err)
		}
	})
}

// withoutFiles calls f while this process, which is the test's own, may open no
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
