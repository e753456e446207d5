package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Kernel reads and writes the iptables tables of the network namespace in which it was opened,
// through one backend. All its methods may be called concurrently; a Session may not be shared.
//
// A Kernel never mistakes "unknown" for "nothing there", and never creates a table by looking at
// it. It reads from the kernel directly, by netlink or socket options; on nft it mirrors whole
// tables. It executes iptables only for restores as text. Each child has a deadline and a private
// XTABLES_LOCKFILE. So it neither waits for the lock that a Session holds nor wakes processes that
// watch the lock.
type Kernel struct {
	cfg      Config
	info     Info
	evidence Evidence
	tools    map[rules.Family]tools
	disabled map[rules.Family]error
	reader   reader
	cache    *readCache
	mirror   *mirror                  // on nft; else nil
	source   lexicons                 // of all families that are open
	budgets  map[rules.Family]*budget // of all families that are open
	sets     setIndex
	private  string   // a folder of our own, for the children's lock file
	children children // the programs that wrote
	// initialPIDs reports that /proc has the pids of the initial pid namespace, which the kernel
	// names in commits.
	initialPIDs bool
	// subscriptions do not listen while a large transaction is sent.
	subscriptions nft.Subscriptions
	// port is the netlink address of canaryd's own transactions, which a commit's notification
	// contains (nf_tables_gen_notify). The pid there is a thread's, in the initial pid
	// namespace, and so does not identify this process.
	port   uint32
	keeper Keeper
	// muted is another netlink address whose commits are the Kernel's own; see Mute.
	muted atomic.Uint32
}

// Open chooses a backend unless cfg forces one, finds its programs and opens the kernel. It
// creates no table. Its errors are one line with a remedy. A family that the kernel or the tools
// lack is disabled without an error, unless none is left.
func Open(ctx context.Context, cfg Config) (*Kernel, error) {
	cfg = cfg.withDefaults()
	if !slices.Contains([]Replay{ReplayAuto, ReplayText, ReplayDirect}, cfg.Replay) {
		return nil, fmt.Errorf("the replay is %q: want %q, %q or %q", cfg.Replay, ReplayAuto, ReplayText, ReplayDirect)
	}
	evidence, err := choose(ctx, cfg)
	if err != nil {
		return nil, err
	}
	k := &Kernel{cfg: cfg, evidence: evidence, disabled: map[rules.Family]error{}, port: nft.NewPort()}
	if initial, err := nft.InitialPIDs("/proc"); err == nil {
		k.initialPIDs = initial
	}
	if k.tools, err = k.findTools(ctx, evidence.Backend); err != nil && cfg.Backend == "" && evidence.Empty() {
		err = k.useWhatIsInstalled(ctx, err)
	}
	if k.evidence.Backend == NFT && (err != nil || len(k.disabled) > 0) {
		err = k.goWithout(ctx)
	}
	if err != nil {
		return nil, err
	}
	if backend := k.evidence.Backend; cfg.Replay == ReplayDirect && backend != NFT {
		return nil, fmt.Errorf("a direct replay needs the nft backend, and this is %s: use --replay=auto", backend)
	}
	if err := k.inspect(ctx); err != nil {
		return nil, err
	}
	if cfg.Replay == ReplayText && k.info.Missing != "" {
		return nil, fmt.Errorf("a replay by text needs iptables: %s", k.info.Missing)
	}
	if err := k.open(); err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

// choose gathers evidence for Open. A forced backend is used even if the evidence cannot be
// read. But missing privileges are an error, because nothing works without them.
func choose(ctx context.Context, cfg Config) (Evidence, error) {
	switch cfg.Backend {
	case "", NFT, Legacy:
	default:
		return Evidence{}, fmt.Errorf("the backend is %q: want %q or %q, or nothing to choose by evidence", cfg.Backend, NFT, Legacy)
	}
	evidence, err := Choose(ctx, cfg.chooseConfig())
	if cfg.Backend == "" {
		return evidence.Prefer(cfg.Before), err
	}
	if errors.Is(err, nft.ErrPermission) {
		return Evidence{}, err
	}
	return evidence.Force(cfg.Backend), nil
}

// Info describes the Kernel.
func (k *Kernel) Info() Info { return k.info }

// Evidence returns the evidence by which the backend was chosen.
func (k *Kernel) Evidence() Evidence { return k.evidence }

// Families returns the families that are open, in their fixed order.
func (k *Kernel) Families() []rules.Family { return slices.Sorted(maps.Keys(k.tools)) }

// Disabled returns the reasons why requested families are not open.
func (k *Kernel) Disabled() map[rules.Family]error { return maps.Clone(k.disabled) }

// Close ends the Kernel. Sessions and Subscriptions must be closed first.
func (k *Kernel) Close() error {
	errs := []error{k.keeper.Close()}
	if k.mirror != nil {
		errs = append(errs, k.mirror.close())
	}
	if k.reader != nil {
		errs = append(errs, k.reader.close())
	}
	if numbers, ok := k.sets.(*setNumbers); ok {
		errs = append(errs, numbers.close())
	}
	if k.private != "" {
		errs = append(errs, os.RemoveAll(k.private))
	}
	return errors.Join(errs...)
}

// Subscribe opens a subscription to commits; see nft.Subscription. It works on the legacy
// backend, too, but hears only commits to nf_tables.
func (k *Kernel) Subscribe() (*nft.Subscription, error) {
	return k.subscriptions.Subscribe(k.OwnCommit)
}

// Port returns the netlink address of the Kernel's transactions. Other transactions from it
// count as the Kernel's own.
func (k *Kernel) Port() uint32 { return k.port }

// Mute makes transactions from that netlink address count as the Kernel's own, and keeps their
// changes out of the sockets that follow the tables. The standby's writes are large, and concern no
// other table. Mute replaces the address of an earlier call; 0 is none. The next read applies it.
func (k *Kernel) Mute(port uint32) { k.muted.Store(port) }

// Muted returns the address of the last Mute, for nft.OpenEvents.
func (k *Kernel) Muted() uint32 { return k.muted.Load() }

// noFamily returns the reason why a family is not open, which every read or write of it gets.
func (k *Kernel) noFamily(family rules.Family) error {
	if err := k.disabled[family]; err != nil {
		return err
	}
	return fmt.Errorf("%w: %v was not asked for", ErrNoFamily, family)
}

// findTools finds each family's programs on a backend, for Open. A family without them is
// disabled: k.disabled has the reason. It is an error if IPv4 or all families lack them.
func (k *Kernel) findTools(ctx context.Context, backend Backend) (map[rules.Family]tools, error) {
	found := map[rules.Family]tools{}
	var errs []error
	for _, family := range k.cfg.Families {
		t, err := findTools(ctx, backend, family)
		if family == rules.IPv6 && err == nil {
			err = haveIPv6()
		}
		if err == nil {
			found[family] = t
			continue
		}
		k.disabled[family] = fmt.Errorf("%w: %v: %w", ErrNoFamily, family, err)
		errs = append(errs, err)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("cannot use the %s backend: %w", backend, oneLine(errs))
	}
	// Without IPv4's programs nothing of Kubernetes works. This is a mistake in the image, not a
	// variant of the node.
	if err := k.disabled[rules.IPv4]; err != nil && slices.Contains(k.cfg.Families, rules.IPv4) {
		return nil, fmt.Errorf("cannot use the %s backend: %w", backend, errs[0])
	}
	return found, nil
}

// useWhatIsInstalled changes to the other backend if there is no evidence for either and the
// first one's programs are missing; Open calls it. If the other one's are missing, too, it
// returns the error missing.
func (k *Kernel) useWhatIsInstalled(ctx context.Context, missing error) error {
	other := k.evidence.Backend.Other()
	clear(k.disabled)
	found, err := k.findTools(ctx, other)
	if err != nil {
		return missing
	}
	k.tools = found
	k.evidence.Backend = other
	k.evidence.Reason = fmt.Sprintf("iptables' tables hold no rules, and only %s is installed", other)
	return nil
}

// goWithout also opens the families whose programs are missing, because on nft canaryd reads
// and writes rules without a program. Open calls it. Only a text that a person declared, or
// that was stored, needs one.
func (k *Kernel) goWithout(ctx context.Context) error {
	clear(k.disabled)
	k.tools = map[rules.Family]tools{}
	for _, family := range k.cfg.Families {
		if family == rules.IPv6 {
			if err := haveIPv6(); err != nil {
				k.disabled[family] = fmt.Errorf("%w: %v: %w", ErrNoFamily, family, err)
				continue
			}
		}
		k.tools[family], _ = findTools(ctx, NFT, family) // the tools have the error
	}
	if len(k.tools) == 0 {
		return fmt.Errorf("cannot use the %s backend: %w", NFT, oneLine(slices.Collect(maps.Values(k.disabled))))
	}
	return nil
}

// haveIPv6 returns the reason why the kernel has no IPv6, or nil. Open and Choose leave the
// family out then. With ipv6.disable=1 no socket can be opened.
func haveIPv6() error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("the kernel has no IPv6: %w", err)
	}
	return unix.Close(fd)
}

// inspect reads the version from the first installed program, in the order of the families, for
// Info. Open fails with its error, such as a version that is too old (checkVersion).
func (k *Kernel) inspect(ctx context.Context) error {
	k.info = Info{Backend: k.evidence.Backend, Reason: k.evidence.Reason, Mixed: k.evidence.Mixed}
	for _, family := range k.Families() {
		if err := k.tools[family].missing; err != nil {
			k.info.Missing = cmp.Or(k.info.Missing, err.Error())
			continue
		}
		if k.info.Version != "" {
			continue
		}
		v, randomFully, err := inspect(ctx, k.tools[family].iptables, family)
		if err != nil {
			return err
		}
		k.info.Version, k.info.RandomFully = v.String(), randomFully
		if err := checkVersion(k.info.Backend, v); err != nil {
			return err
		}
	}
	return nil
}

// open opens all resources that Close must close; Open calls it last, and Close after its
// error.
func (k *Kernel) open() error {
	private, err := os.MkdirTemp("", "canaryd-")
	if err != nil {
		return fmt.Errorf("a private folder for the children's lock file: %w", err)
	}
	k.private = private
	k.budgets = map[rules.Family]*budget{}
	for family := range k.tools {
		k.budgets[family] = newBudget(k.cfg.MaxRules, k.cfg.Canary, k.cfg.Protects)
	}
	k.cache = newReadCache()
	err = k.openReader()
	if err == nil || errors.Is(err, nft.ErrPermission) {
		return err
	}
	return fmt.Errorf("the kernel's tables cannot be read: %w", err)
}

// openReader opens the connections to the tables of the chosen backend; open calls it. On nft
// these are nf_tables and its mirror, on legacy a socket and a lexicon for each family.
func (k *Kernel) openReader() error {
	if k.info.Backend == NFT {
		r, err := openNFTReader()
		if err == nil {
			k.sets = &setNumbers{}
			k.reader, k.mirror = r, k.newMirror(r)
		}
		return err
	}
	r, err := openXTReader(k.Families())
	if err != nil {
		return err
	}
	k.reader, k.source, k.sets = r, lexicons{}, &setNumbers{}
	for family := range k.tools {
		k.source[family] = newLexicon(family, true, k.sets)
	}
	return nil
}

// openNFTReader opens two netlink sockets: for reads, and for many questions at once (Asker).
// It queries the genid, so that a kernel that refuses queries is found at the start. An error
// leaves nothing open.
func openNFTReader() (nftReader, error) {
	conn, err := nft.Dial()
	if err != nil {
		return nftReader{}, err
	}
	r := nftReader{conn: conn, memory: newNFTMemory()}
	if _, err = conn.Genid(); err == nil {
		r.asker, err = nft.OpenAsker()
	}
	if err != nil {
		conn.Close()
		return nftReader{}, err
	}
	return r, nil
}

// openXTReader opens a socket for each family. An error leaves nothing open. It refuses a 386
// program, which could not read the entries.
func openXTReader(families []rules.Family) (xtReader, error) {
	if err := readsEntries(); err != nil {
		return xtReader{}, err
	}
	r := xtReader{sockets: map[rules.Family]*xtSocket{}}
	for _, family := range families {
		s, err := openXT(family)
		if err != nil {
			r.close()
			return xtReader{}, err
		}
		r.sockets[family] = s
	}
	return r, nil
}

// childEnv gives every child another lock file. nft's programs ignore it.
func (k *Kernel) childEnv() []string {
	return []string{lockVariable + "=" + filepath.Join(k.private, "lock")}
}

// oneLine joins errors with "; " instead of line breaks, because logs have a line for each; nil
// if all are nil.
func oneLine(errs []error) error {
	var all error
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = err
		default:
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	return all
}
