package iptables

import (
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Config says how to open a Kernel. The zero value is usable.
type Config struct {
	// Backend forces a backend; "" chooses by evidence (see Choose).
	Backend Backend
	// Families are those wanted; nil means all that exist. A family that the
	// kernel or the tools lack is left out, see Kernel.Disabled.
	Families []rules.Family
	// Canary is the name of our own chain, which is no evidence for a
	// backend; "" if there is none.
	Canary string
	// LockFile is the xtables lock of other programs; "" means
	// /run/xtables.lock.
	LockFile string
	// LockWait is how long Begin waits for the lock; 0 means 5 s.
	LockWait time.Duration
	// RestoreTimeout is after how long a restore is killed; 0 means 2 min.
	// 60 s is the least: a restore of 7.7 s that is killed at 5 s fails for
	// ever, and a loaded node is slower than the one that was measured.
	RestoreTimeout time.Duration
	// ReadTimeout is after how long a full read is killed; 0 means 30 s.
	// iptables-nft-save retries inside itself and may never return under
	// commits from others.
	ReadTimeout time.Duration
}

const (
	defaultLockFile       = "/run/xtables.lock"
	defaultLockWait       = 5 * time.Second
	defaultRestoreTimeout = 2 * time.Minute
	minRestoreTimeout     = time.Minute
	defaultReadTimeout    = 30 * time.Second
)

func (c Config) withDefaults() Config {
	if c.Families == nil {
		c.Families = rules.Families()
	}
	if c.LockFile == "" {
		c.LockFile = defaultLockFile
	}
	if c.LockWait == 0 {
		c.LockWait = defaultLockWait
	}
	if c.RestoreTimeout == 0 {
		c.RestoreTimeout = defaultRestoreTimeout
	}
	c.RestoreTimeout = max(c.RestoreTimeout, minRestoreTimeout)
	if c.ReadTimeout == 0 {
		c.ReadTimeout = defaultReadTimeout
	}
	return c
}

func (c Config) chooseConfig() ChooseConfig {
	return ChooseConfig{Families: c.Families, Canary: c.Canary}
}
