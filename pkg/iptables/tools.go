package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// versionTimeout bounds "iptables --version", which takes about 1 ms.
const versionTimeout = 10 * time.Second

// A version is the version of the iptables programs.
type version [3]int

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

func (v version) before(o version) bool { return slices.Compare(v[:], o[:]) < 0 }

// movableLock is the first version that honours XTABLES_LOCKFILE. With an earlier version,
// canaryd's own restore would wait for the lock that canaryd holds.
var movableLock = version{1, 8, 6}

// tools are the absolute paths of one family's programs on one backend.
type tools struct {
	iptables, restore string
	missing           error // why they cannot be executed; then they are names without paths
}

// familyPrefix returns the prefix of the family's programs and proc files: "ip" or "ip6".
func familyPrefix(family rules.Family) string {
	if family == rules.IPv6 {
		return "ip6"
	}
	return "ip"
}

// findTools looks for the programs of family on backend. It tries names with the backend first
// ("iptables-nft-restore"), then plain names if their version text names the backend. After an
// error it returns names without paths. The error names the missing program.
func findTools(ctx context.Context, backend Backend, family rules.Family) (tools, error) {
	base := familyPrefix(family) + "tables"
	names := base + "-" + string(backend)
	t := tools{iptables: names, restore: names + "-restore"}
	found := t
	for _, path := range []*string{&found.iptables, &found.restore} {
		exact := *path
		if *path = lookUp(exact); *path == "" {
			*path = lookUp(base + strings.TrimPrefix(exact, names))
			if *path == "" || backendOf(ctx, *path) != backend {
				t.missing = fmt.Errorf("%s is not installed: install the package \"iptables\" (%s)", exact, packageHint(backend))
				return t, t.missing
			}
		}
	}
	return found, nil
}

// packageHint returns the names of the distributions' packages, for the error of findTools.
func packageHint(backend Backend) string {
	if backend == NFT {
		return "Fedora, RHEL: \"iptables-nft\""
	}
	return "Fedora: \"iptables-legacy\""
}

// lookUp returns the absolute path of a program (iptables, ipset), or "". It also searches
// root's folders, which a service manager or an unprivileged shell may leave out.
func lookUp(name string) string {
	dirs := append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin")
	for _, dir := range dirs {
		if !filepath.IsAbs(dir) {
			continue
		}
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path
		}
	}
	return ""
}

// backendOf queries a program with a plain name for its backend, for findTools; "" if it cannot
// be executed. Versions before 1.8 do not name it and are legacy.
func backendOf(ctx context.Context, path string) Backend {
	res, err := command{path: path, args: []string{"--version"}, timeout: versionTimeout}.run(ctx)
	if err != nil || res.exit != 0 {
		return ""
	}
	if bytes.Contains(res.stdout, []byte("(nf_tables)")) {
		return NFT
	}
	return Legacy
}

// askLockWait is for the private lock, in seconds, which only canaryd's own restores take.
const askLockWait = 5

// inspect has go-iptables query a program for its version, for which iptables-nft needs
// netlink, and for --random-fully; Kernel.inspect calls it. go-iptables drops the program's
// complaints, so inspect executes a failed program again.
func inspect(ctx context.Context, path string, family rules.Family) (v version, randomFully bool, err error) {
	proto := goiptables.ProtocolIPv4
	if family == rules.IPv6 {
		proto = goiptables.ProtocolIPv6
	}
	t, err := goiptables.New(goiptables.Path(path), goiptables.IPFamily(proto), goiptables.Timeout(askLockWait))
	if err == nil {
		v[0], v[1], v[2] = t.GetIptablesVersion()
		return v, t.HasRandomFully(), nil
	}
	res, again := command{path: path, args: []string{"--version"}, timeout: versionTimeout}.run(ctx)
	switch {
	case again != nil:
		return v, false, again
	case res.exit == 0:
		return v, false, fmt.Errorf("%s does not tell its version: %w", path, err)
	case !strings.Contains(string(res.stderr), "Failed to initialize nft"):
		return v, false, exitError(path, res)
	}
	return v, false, fmt.Errorf("the kernel or a sandbox refuses netlink sockets (AF_NETLINK, NETLINK_NETFILTER), which nf_tables is asked through: modprobe nf_tables, "+
		"allow them (seccomp, SELinux, systemd's RestrictAddressFamilies=), or use --backend=legacy: %w", exitError(path, res))
}

// checkVersion refuses a version that canaryd cannot work with safely: Open fails.
func checkVersion(backend Backend, v version) error {
	if backend == Legacy && v.before(movableLock) {
		return fmt.Errorf("iptables-legacy %v cannot move its lock (XTABLES_LOCKFILE): upgrade iptables to %v or later", v, movableLock)
	}
	return nil
}

// isPermissionText reports whether a program's complaint is about privileges, which then is
// nft.ErrPermission (exitError), and no fault of a rule (classify).
func isPermissionText(stderr string) bool {
	return strings.Contains(stderr, "Permission denied") ||
		strings.Contains(stderr, "Operation not permitted") ||
		strings.Contains(stderr, "you must be root")
}

// exitError describes a child that ended with an exit code other than 0, as one line. It is
// nft.ErrPermission if the child lacked privileges.
func exitError(path string, res result) error {
	text := strings.TrimSpace(string(res.stderr))
	err := errors.New(strings.Join(strings.Fields(text), " "))
	if text == "" {
		err = errors.New("no message")
	}
	if isPermissionText(text) {
		return fmt.Errorf("%w: %s, exit %d: %w", nft.ErrPermission, filepath.Base(path), res.exit, err)
	}
	return fmt.Errorf("%s, exit %d: %w", filepath.Base(path), res.exit, err)
}
