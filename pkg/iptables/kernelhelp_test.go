package iptables

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// onBoth runs body in a namespace of its own for each backend and family.
func onBoth(t *testing.T, body func(t *testing.T, backend Backend, family rules.Family)) {
	for _, backend := range []Backend{NFT, Legacy} {
		for _, family := range rules.Families() {
			t.Run(string(backend)+"/"+family.String(), func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func(t *testing.T) {
					nstest.NeedProgram(t, program(backend, family, ""))
					body(t, backend, family)
				})
			})
		}
	}
}

func program(backend Backend, family rules.Family, suffix string) string {
	return familyPrefix(family) + "tables-" + string(backend) + suffix
}

// iptablesCommand executes a command line, such as "-t nat -N X", in another
// program than the Kernel.
func iptablesCommand(t *testing.T, backend Backend, family rules.Family, line string) {
	t.Helper()
	nstest.Command(t, program(backend, family, ""), append([]string{"-w", "5"}, strings.Fields(line)...)...)
}

func openKernel(t *testing.T, cfg Config) *Kernel {
	t.Helper()
	k, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

func begin(t *testing.T, k *Kernel) Session {
	t.Helper()
	s, err := k.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func mustRead(t *testing.T, s interface {
	Read(ctx context.Context, family rules.Family) (Snapshot, error)
}, family rules.Family) Snapshot {
	t.Helper()
	snapshot, err := s.Read(t.Context(), family)
	if err != nil {
		t.Fatal(err)
	}
	return snapshot
}

func mustProbe(t *testing.T, k *Kernel, family rules.Family, places ...Place) Probed {
	t.Helper()
	probed, err := k.Probe(t.Context(), family, places)
	if err != nil {
		t.Fatal(err)
	}
	return probed
}

func mustStamp(t *testing.T, k *Kernel, family rules.Family) Stamp {
	t.Helper()
	stamp, err := k.Stamp(t.Context(), family)
	if err != nil {
		t.Fatal(err)
	}
	return stamp
}

// tablesOf lists the tables that exist, without a program: listing tables makes none.
func tablesOf(t *testing.T, backend Backend) string {
	t.Helper()
	var list strings.Builder
	if backend == NFT {
		err := dialTest(t).EachTable(func(table nft.Table) error {
			fmt.Fprintln(&list, table.Family, table.Name)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return list.String()
	}
	for _, file := range []string{"/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"} {
		names, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		list.Write(names)
	}
	return list.String()
}

// dropNetAdmin takes CAP_NET_ADMIN from this goroutine's thread, which ends
// with the goroutine.
func dropNetAdmin(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		t.Fatal(err)
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&head, &data[0]); err != nil {
		t.Fatal(err)
	}
}
