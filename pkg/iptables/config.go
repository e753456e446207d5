package iptables

import (
	"cmp"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Config says how to open a Kernel. The zero value is usable.
type Config struct {
	// Backend forces a backend; "" chooses by evidence (see Choose).
	Backend Backend
	// Before is the backend that was guarded before in this boot and network namespace, or "".
	// It is chosen if the evidence is for neither backend.
	Before Backend
	// Families are the requested families; nil means all that exist. A family that the kernel or
	// the tools lack is left out, see Kernel.Disabled.
	Families []rules.Family
	// Canary is the name of canaryd's own chain, which is no evidence for a backend; "" if there
	// is none.
	Canary string
	// LockFile is the xtables lock of other programs; "" means /run/xtables.lock.
	LockFile string
	// LockWait is how long Begin waits for the lock; 0 means 5 s.
	LockWait time.Duration
	// RestoreTimeout is the time after which a restore is killed; 0 means 2 min. The minimum is
	// 60 s: a restore that needs 7.7 s and is killed after 5 s fails for ever. A loaded node is
	// slower than the measured one.
	RestoreTimeout time.Duration
	// ReadTimeout is the time after which a read of nf_tables fails; 0 means 30 s. A read of
	// legacy tables ends by itself.
	ReadTimeout time.Duration
	// Replay is the path on which a Restore writes; "" means ReplayAuto.
	Replay Replay
	// MaxRules is the maximum number of rules that are kept of a family. 0 means
	// DefaultMaxRules, a negative number no limit. A Snapshot has no rules of the chains beyond
	// the limit; see LeftOut.
	MaxRules int
	// Protects names the protected chains, which are left out last; nil means all.
	Protects func(chain string) bool
}

// A Replay is a path from a Payload to the kernel, by the values of --replay.
type Replay string

// The paths.
const (
	// ReplayAuto writes directly where it can, and the rest as text.
	ReplayAuto Replay = "auto"
	// ReplayText writes through iptables-restore, except for tables with opaque rules. On legacy it
	// also excepts tables with a text whose bytes canaryd does not know yet.
	ReplayText Replay = "text"
	// ReplayDirect is for the nft backend only. Rules that the direct path cannot express still
	// go through iptables-restore: a rule that names an ipset would otherwise never come back.
	// But a transaction that the kernel refuses is an error and is not repeated as text.
	ReplayDirect Replay = "direct"
)

const (
	defaultLockFile       = "/run/xtables.lock"
	defaultLockWait       = 5 * time.Second
	defaultRestoreTimeout = 2 * time.Minute
	minRestoreTimeout     = time.Minute
	defaultReadTimeout    = 30 * time.Second
)

// withDefaults returns the Config with each default in place of a zero, and the minimum of
// RestoreTimeout. From here on, MaxRules 0 means no limit.
func (c Config) withDefaults() Config {
	if c.Families == nil {
		c.Families = rules.Families()
	}
	c.LockFile = cmp.Or(c.LockFile, defaultLockFile)
	c.LockWait = cmp.Or(c.LockWait, defaultLockWait)
	c.RestoreTimeout = max(cmp.Or(c.RestoreTimeout, defaultRestoreTimeout), minRestoreTimeout)
	c.ReadTimeout = cmp.Or(c.ReadTimeout, defaultReadTimeout)
	c.MaxRules = max(cmp.Or(c.MaxRules, DefaultMaxRules), 0)
	c.Replay = cmp.Or(c.Replay, ReplayAuto)
	return c
}

func (c Config) chooseConfig() ChooseConfig {
	return ChooseConfig{Families: c.Families, Canary: c.Canary}
}
