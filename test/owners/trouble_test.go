package owners

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

var (
	lockHeld  = testkit.Size(5*time.Second, 15*time.Second)
	suspended = testkit.Size(6*time.Second, 30*time.Second)
)

// troubleStories are about failures around canaryd.
func troubleStories() []story {
	return []story{
		{
			name: "the xtables lock is held", backends: []iptables.Backend{iptables.Legacy},
			prepare: loadOnly, happens: heldLock,
		},
		{name: "iptables is upgraded", same: true, prepare: upgradable, happens: upgrade},
		{name: "memory is short", prepare: starved, happens: starve},
		{name: "canaryd is suspended while an owner works", prepare: loadOnly, happens: suspendBesideOwner},
	}
}

func loadOnly(n *nodetest.Node, _ *story) []string { n.Load(); return nil }

// heldLock makes another process keep the lock while the marks wait to be
// renewed.
func heldLock(n *nodetest.Node, _ *nodetest.Process) {
	newEndpoint(n, 1)
	holder := n.HoldLock(lockHeld)
	ended := make(chan error, 1)
	go func() { ended <- holder.Wait() }()
	n.Until("the lock to be free", func() error {
		for family, tables := range n.Published().Families {
			for table, v := range tables {
				if !slices.Contains([]string{"unknown", "intact", "changed"}, v) {
					n.Errorf("%s %s is %s while the lock is held", family, table, v)
				}
			}
		}
		select {
		case err := <-ended:
			n.Must(err)
			return nil
		default:
			return errors.New("it is held")
		}
	})
}

// newEndpoint makes kube-proxy write a service with its nth endpoint.
func newEndpoint(n *nodetest.Node, nth int) {
	n.Helper()
	n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, fmt.Sprintf(`*nat
:KUBE-SVC-LATECOMER2345672 - [0:0]
:KUBE-SEP-LATECOMER2345673 - [0:0]
-A KUBE-SVC-LATECOMER2345672 -m comment --comment "demo/latecomer" -j KUBE-SEP-LATECOMER2345673
-A KUBE-SEP-LATECOMER2345673 -s 10.1.7.%[1]d -j KUBE-MARK-MASQ
-A KUBE-SEP-LATECOMER2345673 -m tcp -p tcp -j DNAT --to-destination 10.1.7.%[1]d:8080
COMMIT
`, nth)))
}

// noEndpoint makes kube-proxy remove that service.
func noEndpoint(n *nodetest.Node) {
	n.Helper()
	n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, `*nat
:KUBE-SVC-LATECOMER2345672 - [0:0]
:KUBE-SEP-LATECOMER2345673 - [0:0]
-X KUBE-SVC-LATECOMER2345672
-X KUBE-SEP-LATECOMER2345673
COMMIT
`))
}

const own = "/run/programs" // a folder with programs for canaryd alone

// programs are the programs that canaryd executes.
func programs(n *nodetest.Node) []string {
	var all []string
	for _, family := range rules.Families() {
		for _, suffix := range []string{"", "-save", "-restore"} {
			all = append(all, program(n, family, suffix))
		}
	}
	return all
}

// upgradable gives canaryd copies of the programs, which an upgrade may
// replace.
func upgradable(n *nodetest.Node, _ *story) []string {
	n.Load()
	n.Must(os.MkdirAll(own, 0o755))
	for _, name := range programs(n) {
		path, err := exec.LookPath(name)
		n.Must(err)
		text, err := os.ReadFile(path)
		n.Must(err)
		n.Must(os.WriteFile(filepath.Join(own, name), text, 0o755))
	}
	n.Env = append(n.Env, "PATH="+own+":"+os.Getenv("PATH"))
	return nil
}

// upgrade removes the programs while an owner works. Later it renames another
// version's programs into their place. That version says so, warns of something,
// and saves comments in other quotes.
func upgrade(n *nodetest.Node, _ *nodetest.Process) {
	for _, name := range programs(n) {
		n.Must(os.Rename(filepath.Join(own, name), filepath.Join(own, "old-"+name)))
	}
	for nth := range 10 {
		newEndpoint(n, nth+1)
		n.Looked()
	}
	for _, name := range programs(n) {
		path, err := exec.LookPath(name)
		n.Must(err)
		script := fmt.Sprintf(`#!/bin/sh
case "$1" in --version|-V) echo "%s v1.8.99 (%s)"; exit 0;; esac
echo "# Warning: this is another version" >&2
case "$0" in
*-save) "%s" "$@" | sed -E 's/--comment ([^" ]+)/--comment "\1"/' ;;
*) exec "%s" "$@" ;;
esac
`, strings.SplitN(name, "-", 2)[0], map[iptables.Backend]string{iptables.NFT: "nf_tables", iptables.Legacy: "legacy"}[n.Programs.With], path, path)
		next := filepath.Join(own, "new-"+name)
		n.Must(os.WriteFile(next, []byte(script), 0o755))
		n.Must(os.Rename(next, filepath.Join(own, name)))
		n.Looked()
	}
	for nth := range 10 {
		newEndpoint(n, nth+20)
		n.Looked()
	}
}

// starved gives canaryd next to no memory.
func starved(n *nodetest.Node, s *story) []string {
	upgradable(n, s)
	n.Env = append(n.Env, "GOMEMLIMIT=1MiB")
	return nil
}

// killing stands in for a program of iptables that the kernel's killer may
// choose. Of five saves one dies in mid-sentence and one gets no memory. Of four
// restores one dies before its first action. Another dies after its last,
// together with the save that would have shown its result.
const killing = `#!/bin/sh
cd /run/programs
[ -e plenty ] && exec real/NAME "$@"
echo >> turns-KIND
case KIND-$(($(wc -l < turns-KIND) % MODULUS)) in
save-1) ulimit -v 3000; exec real/NAME "$@" ;;
save-2) real/NAME "$@" | head -n 40; kill -KILL $$ ;;
restore-1) real/NAME "$@"; touch blind; kill -KILL $$ ;;
restore-3) kill -KILL $$ ;;
esac
case KIND in save) rm blind 2>/dev/null && kill -KILL $$ ;; esac
exec real/NAME "$@"
`

// starve makes owners work while memory is short. canaryd collects garbage all
// the time, and many of the programs that it executes die early.
func starve(n *nodetest.Node, _ *nodetest.Process) {
	n.Must(os.Mkdir(filepath.Join(own, "real"), 0o755))
	for _, name := range programs(n) {
		kind, modulus := "save", "5"
		if !strings.HasSuffix(name, "-save") {
			kind, modulus = "restore", "4"
		}
		script := strings.NewReplacer("NAME", name, "KIND", kind, "MODULUS", modulus).Replace(killing)
		n.Must(os.Rename(filepath.Join(own, name), filepath.Join(own, "real", name)))
		next := filepath.Join(own, "new-"+name)
		n.Must(os.WriteFile(next, []byte(script), 0o755))
		n.Must(os.Rename(next, filepath.Join(own, name)))
	}
	for nth := range testkit.Size(8, 12) {
		newEndpoint(n, nth+1)
		if nth%4 == 3 {
			noEndpoint(n)
		}
		n.Polled(2) // marks are renewed meanwhile
	}
	n.Must(os.WriteFile(filepath.Join(own, "plenty"), nil, 0o600))
	for _, kind := range []string{"save", "restore"} {
		executed, err := os.ReadFile(filepath.Join(own, "turns-"+kind))
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // none: canaryd does without them
			n.Error(err)
		}
		n.Logf("canaryd executed %d times a %s while memory was short", len(executed), kind)
	}
}

// suspendBesideOwner stops canaryd while services change.
func suspendBesideOwner(n *nodetest.Node, d *nodetest.Process) {
	newEndpoint(n, 1)
	d.Suspend()
	nth := 0
	for range testkit.During(n.T, suspended, "how long canaryd is suspended") {
		newEndpoint(n, nth%250+1)
		if nth%3 == 0 {
			noEndpoint(n)
		}
		nth++
		testkit.Pass(n.T, 300*time.Millisecond, "the owner's pause between two changes")
	}
	newEndpoint(n, 251)
	d.Signal(syscall.SIGCONT)
}
