package pods

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// At its DEL a pod's rules are deleted individually, and its file is removed after them. An
// agent that cleans up, as Cilium does, deletes the same rules of living pods. While the file
// exists, canaryd does not know which case it is, and keeps the rules in the generation. Then
// the process decides, and after that the time. A plugin, or its child, is the owner. Rules
// that another process removed are lost after the jump grace. Rules that an unknown process
// removed are lost after DelLasts. They are missed after the jump grace, well after most DELs;
// from then on the node is not healthy, and its status has a record.

// DelLasts is how long a DEL may take after it removes its first rule. kubelet gives a runtime
// two minutes (--runtime-request-timeout), and then tries again.
const DelLasts = 3 * time.Minute

// A Robbery is the set of one family's missing rules of a pod whose file exists.
type Robbery struct {
	Since   time.Time
	by      robber
	size    int // the number of missing rules and chains
	lack    protect.Lack
	InForce time.Time // when all of it was last known to be in force
	// missed means that the process is unknown, the jump grace is over, and the rules are still
	// missing.
	missed bool
}

// A robber classifies the process that removed rules of a pod.
type robber int

const (
	robberUnknown robber = iota
	robberOther          // not the owner
	robberOwner          // a CNI plugin
)

type robberyKey struct {
	family     rules.Family
	attachment protect.Attachment
}

// A Sight is a full read's result for a family's living pods.
type Sight struct {
	Family  rules.Family
	Lacks   map[protect.Attachment]protect.Lack // by pod
	Looked  bool                                // lacks is known
	InForce time.Time                           // when all of it was last known to be in force
	Read    culprit.Read
	Now     time.Time
	Inquire func() culprit.Inquiry // queries the kernel
}

// Lacking returns the rules that each living pod lacks in a section. want is the generation's
// section of nat, nat the kernel's. The loop gives the result to Follow.
func (w *Watch) Lacking(want, nat rules.Section) map[protect.Attachment]protect.Lack {
	lacks := protect.Lacking(want, nat, w.living)
	w.leaveLiving(lacks)
	return lacks
}

// leaveLiving removes all pods but the living ones.
func (w *Watch) leaveLiving(lacks map[protect.Attachment]protect.Lack) {
	maps.DeleteFunc(lacks, func(a protect.Attachment, _ protect.Lack) bool { return !w.lives(a) })
}

// Follow takes a full read's result for the living pods into the Watch. It reports whether the
// rules of a pod count as lost from now on.
func (w *Watch) Follow(ctx context.Context, s Sight) bool {
	f, now, lacks := s.Family, s.Now, s.Lacks
	w.leaveLiving(lacks)
	for k, r := range w.robbed {
		if _, still := lacks[k.attachment]; k.family == f && !still {
			delete(w.robbed, k)
			if r.missed {
				severity.Notices(klog.FromContext(ctx)).Info("The rules of a pod are no longer missing: they are back, or the pod is gone", "family", f, "pod", w.name(k.attachment))
			}
		}
	}
	lost, last := false, w.followed[f]
	for a, lack := range lacks {
		k := robberyKey{f, a}
		r, known := w.robbed[k]
		if !known {
			r.Since, r.InForce = now, s.InForce
		}
		r.lack = lack
		// The file shows its later fate. Other pods may end meanwhile.
		size := len(lack.Rules) + len(lack.Chains)
		switch grown := size > r.size; {
		case r.by != robberUnknown:
		case lack.Ahead:
			r.by = robberOther
		case grown:
			r.by = robberOf(s, lack, last, !known)
		}
		r.size = size
		if r.by == robberUnknown && w.known[a].removedAgain(f, r.Since) {
			r.by = robberOwner // its DEL may fail again and again
			severity.Warnings(klog.FromContext(ctx)).Info("An unknown process removed the rules of a pod once more; canaryd does not put them back", "family", f, "pod", w.name(a))
		}
		missed := r.by == robberUnknown && now.Sub(r.Since) >= w.Grace
		if missed && !r.missed {
			severity.Warnings(klog.FromContext(ctx)).Info("Rules of a running pod are missing; canaryd waits for their owner, and then puts them back",
				"family", f, "pod", w.name(a), "rules", size, "missingFor", now.Sub(r.Since).Round(time.Second), "until", w.LostAt(r).UTC().Format(time.RFC3339))
		}
		r.missed = missed
		if w.robbed == nil {
			w.robbed = map[robberyKey]Robbery{}
		}
		w.robbed[k] = r
		lost = lost || w.lostFor(r, now)
	}
	if !s.Looked {
		return lost // the next look covers the time since the last one
	}
	if w.followed == nil {
		w.followed = map[rules.Family]culprit.Read{}
	}
	w.followed[f] = s.Read
	return lost
}

// living yields the pods that are known to be alive, for Lacking: only their missing rules may
// be a robbery.
func (w *Watch) living(yield func(protect.Attachment) bool) {
	for a := range w.known {
		if w.lives(a) && !yield(a) {
			return
		}
	}
}

// lives reports whether a pod has a file that is removed with it.
func (w *Watch) lives(a protect.Attachment) bool {
	k, ok := w.known[a]
	return ok && k.gone.IsZero() && k.Ends
}

// removedAgain reports whether a replay had put its rules back in that family shortly before
// they were seen missing.
func (k attached) removedAgain(f rules.Family, since time.Time) bool {
	back := k.returnedTo[f]
	return !back.IsZero() && since.After(back) && since.Sub(back) < returnedFor
}

// graceOf returns how long a pod's rules may be missing until they are lost. The jump grace is
// enough if another process than the owner removed them; else a DEL may be under way
// (DelLasts).
func (w *Watch) graceOf(r Robbery) time.Duration {
	if r.by == robberOther {
		return w.Grace
	}
	return max(DelLasts, w.Grace)
}

// lostFor reports whether missing rules are lost.
func (w *Watch) lostFor(r Robbery, now time.Time) bool {
	return r.by != robberOwner && now.Sub(r.Since) >= w.graceOf(r)
}

// RobbedNow returns the pods of each family whose rules are lost. A judgement or replay then
// counts them as lost although their table is intact (Job.Robbed).
func (w *Watch) RobbedNow(now time.Time) map[rules.Family]map[protect.Attachment]bool {
	all := map[rules.Family]map[protect.Attachment]bool{}
	for k, r := range w.robbed {
		if w.lostFor(r, now) && w.lives(k.attachment) {
			if all[k.family] == nil {
				all[k.family] = map[protect.Attachment]bool{}
			}
			all[k.family][k.attachment] = true
		}
	}
	return all
}

// KeptFor returns the pods whose missing rules stay in the generation while it learns. due is
// when the first of them is missed or lost; zero if none will be. The loop reads the family
// then.
func (w *Watch) KeptFor(f rules.Family) (kept map[protect.Attachment]bool, due time.Time) {
	kept = map[protect.Attachment]bool{}
	for k, r := range w.robbed {
		if k.family == f && r.by != robberOwner {
			kept[k.attachment] = true
			at := w.LostAt(r)
			if missedAt := r.Since.Add(w.Grace); !r.missed {
				at = pace.Earliest(at, missedAt)
			}
			due = pace.Earliest(due, at)
		}
	}
	return kept, due
}

// LostSince returns the robberies of a table whose rules are lost by now. The loop dates the
// table's loss from them.
func (w *Watch) LostSince(id rules.TableID, now time.Time) (list []Robbery) {
	for k, r := range w.robbed {
		if k.family == id.Family && id.Name == rules.Nat && w.lostFor(r, now) && w.lives(k.attachment) {
			list = append(list, r)
		}
	}
	return list
}

// LostAt returns when missing rules become lost.
func (w *Watch) LostAt(r Robbery) time.Time { return r.Since.Add(w.graceOf(r)) }

// MissedIn returns, by pod, the robberies of a table that make the node unhealthy. Its verdict
// in a Status is then a loss, and a record names the pods.
func (w *Watch) MissedIn(id rules.TableID) map[protect.Attachment]Robbery {
	if id.Name != rules.Nat || len(w.robbed) == 0 {
		return nil
	}
	list := map[protect.Attachment]Robbery{}
	for k, r := range w.robbed {
		if k.family == id.Family && r.missed && w.lives(k.attachment) {
			list[k.attachment] = r
		}
	}
	return list
}

// AddTo adds the missing rules to a table's loss, for the flush record. want is the
// generation's section: the rules of a missing chain come from it.
func (r Robbery) AddTo(lost *reload.Lost, want rules.Section) {
	lost.Rules += len(r.lack.Rules)
	in := map[string][]rules.Rule{}
	for _, h := range r.lack.Rules {
		if rules.Builtin(rules.Nat, h.Chain) {
			lost.Jumps = append(lost.Jumps, h)
		} else {
			in[h.Chain] = append(in[h.Chain], h.Rule)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(in)) {
		lost.Chains = append(lost.Chains, reload.LostChain{Name: name, Was: in[name], Stands: true})
	}
	for _, name := range r.lack.Chains {
		if c, ok := want.Chain(name); ok {
			lost.Rules += len(c.Rules)
			lost.Chains = append(lost.Chains, reload.LostChain{Name: name, Was: c.Rules})
		}
	}
}

// robberOf classifies for Follow the processes that removed rules from a pod's chains since the
// read before. A plugin among them counts as the remover. whole means that the previous read
// showed all rules of the pod.
func robberOf(s Sight, lack protect.Lack, before culprit.Read, whole bool) robber {
	chains := slices.Clone(lack.Chains)
	for _, h := range lack.Rules {
		chains = append(chains, h.Chain)
	}
	by, takings := s.Inquire().TakersOf(s.Family.Table(rules.Nat), before, s.Read, chains)
	if whole && slices.ContainsFunc(lack.LeadIn(), func(h rules.Jump) bool { return wentAhead(takings, h) }) {
		return robberOther
	}
	known := len(by) > 0
	for _, w := range by {
		if owners.IsCNIPlugin(w.Comm) || slices.ContainsFunc(w.Origin.Ancestors, owners.IsCNIPlugin) {
			return robberOwner
		}
		known = known && len(w.Origin.Ancestors) > 0
	}
	if known {
		return robberOther
	}
	return robberUnknown
}

// wentAhead reports whether a rule was deleted before the chain that it led to: no plugin did
// that, because portmap flushes the chain first. Other pods have rules in the same chain, so
// each commit that removed rules there counts.
func wentAhead(takings []iptables.Taking, h rules.Jump) bool {
	last, chain := -1, -1
	for i, k := range takings {
		if k.Took(h.Chain) {
			last = i
		}
		if k.Took(h.Rule.Target) && chain < 0 {
			chain = i
		}
	}
	return last >= 0 && last < chain
}
