package daemon

import (
	"context"
	"errors"
	"io/fs"
	"syscall"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A failure is why a replay fails, for people. It quotes no rule.
type failure struct {
	is     func(error) bool
	reason string
	advice string
}

// keepsTrying is the advice where only another process, or time, can help.
const keepsTrying = "canaryd keeps trying, and the record has the error in full"

// failures are the known reasons, the most telling first: a replay may fail for several.
var failures = []failure{
	{pace.LockReason, "another process holds the xtables lock", "fuser -v /run/xtables.lock names it"},
	{is(nft.ErrPermission), "the kernel refuses canaryd access to the tables", "give it CAP_NET_ADMIN in the network namespace"},
	{is(nft.ErrNone), "the kernel has no nf_tables", "load the module nf_tables"},
	{is(native.ErrImmune), "one process owns the table, and the kernel lets no other write it", "restart that process"},
	{refusedFor(iptables.ReasonMissingSet), "a rule names an ipset that is missing", "create the set"},
	{refusedFor(iptables.ReasonMissingChain), "a rule leads to a chain or a target that is missing", "load the target's kernel module, or restart the chain's owner"},
	{refusedFor(iptables.ReasonIncompatible), "a table holds chains or rules that iptables cannot read", "nft list ruleset shows them; remove them"},
	{refusedFor(iptables.ReasonParse), "iptables does not understand a rule", "see whether iptables was changed on this node"},
	{refusedFor(iptables.ReasonNotInstalled), "a rule can be written by iptables only, which is not installed", "install the package iptables, and restart canaryd"},
	{is(iptables.ErrNoFamily), "the kernel or iptables lacks the family", "load its kernel modules"},
	{is(nft.ErrTooBig), "the tables are larger than canaryd may send at once", "give canaryd CAP_NET_ADMIN in the first user namespace, or raise net.core.wmem_max"},
	{isAny(syscall.ENOMEM, syscall.ENOBUFS), "the kernel has no memory for the rules", "raise the memory limit of canaryd's group"},
	{refusedFor(iptables.ReasonOther), "iptables or the kernel refuses the rules", keepsTrying},
	{isAny(reload.ErrUnproved, nativestore.ErrNotInForce), "after the write the rules are not in force", keepsTrying},
	{isAny(nativestore.ErrOwnerWrote, nft.ErrStale, nft.ErrInterrupted), "other processes write in the middle of each try", keepsTrying},
	{isAny(fs.ErrNotExist, fs.ErrPermission), "a program or a file that canaryd needs cannot be opened", keepsTrying},
	{is(context.DeadlineExceeded), "it took too long", keepsTrying},
}

// is returns a function that reports whether an error is target.
func is(target error) func(error) bool { return isAny(target) }

// isAny returns a function for failures that reports whether an error is one of these.
func isAny(targets ...error) func(error) bool {
	return func(err error) bool {
		for _, target := range targets {
			if errors.Is(err, target) {
				return true
			}
		}
		return false
	}
}

// refusedFor returns a function for failures that reports whether a restore was refused for
// that reason.
func refusedFor(reason iptables.Reason) func(error) bool {
	return func(err error) bool {
		var refused *iptables.RestoreError
		return errors.As(err, &refused) && refused.Reason == reason
	}
}

// failureOf says why a replay failed, for the status and the log's advice. For an unknown error
// it quotes the kernel, if the kernel gave a reason.
func failureOf(err error) failure {
	for _, f := range failures {
		if f.is(err) {
			return f
		}
	}
	reason := "the log has the reason"
	if cause := pace.CauseOf(err); cause != "" {
		reason = "the kernel says: " + cause
	}
	return failure{reason: reason, advice: keepsTrying}
}

// failing returns why the rules are not back although canaryd has tried, for the status; nil in
// observe mode and in pauses.
func (st *state) failing() (list []api.Failing) {
	for _, a := range st.answers() {
		if a.failed != nil && st.heals() {
			f := failureOf(a.failed)
			list = append(list, api.Failing{Flush: a.record.ID, Attempts: a.attempts, Retry: a.retry.At, Reason: f.reason, Advice: f.advice})
		}
	}
	return list
}
