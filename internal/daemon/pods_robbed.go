package daemon

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A pod's rules go by name at its DEL, and its file goes behind them. An agent that cleans up, as
// Cilium does, deletes the same rules of pods that live. While the file stands it is not known
// which of the two it was: the rules stay in the generation. The process decides, and then time:
// a plugin, or its child, is the owner; the work of another process is lost after the jump grace,
// and that of an unknown one after delLasts. Of that one the rules are missed after the jump grace,
// well behind most DELs: from then on the node is not healthy, and its status has a record.

// delLasts is for how long a DEL may take behind the first rule that it removes. kubelet gives a
// runtime two minutes (--runtime-request-timeout), and then asks again.
const delLasts = 3 * time.Minute

// A robbery is one family's rules of a pod that are missing while its file stands.
type robbery struct {
	since   time.Time
	by      robber
	size    int // how much is missing
	lack    protect.Lack
	inForce time.Time // when all of it was last known to be in force
	// missed: the process is not known, the jump grace is over, and the rules still wait.
	missed bool
}

// A robber is what is known of the process that removed rules of a pod.
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

// followRobberies takes up what a full read showed of the pods that live, and reports whether the
// rules of one count as lost from now on.
func (d *Daemon) followRobberies(ctx context.Context, st *state, f rules.Family, nat rules.Section, finding canary.Finding, now time.Time) bool {
	w := &st.pods
	if d.cfg.Attachments == nil || finding.MarkLost || finding.Verdict == canary.Unknown {
		return false
	}
	lacks, looked := map[protect.Attachment]protect.Lack{}, !st.pause.on()
	if finding.Verdict != canary.Intact && !st.pause.on() {
		lacks = protect.Lacking(st.want()[f.Table(rules.Nat)], nat, w.living)
		dead := func(a protect.Attachment, _ protect.Lack) bool { return !w.lives(a) }
		if maps.DeleteFunc(lacks, dead); len(lacks) > 0 && !d.readPods(ctx, st) {
			clear(lacks)
			looked = false
		}
		maps.DeleteFunc(lacks, dead)
	}
	for k, r := range w.robbed {
		if _, still := lacks[k.attachment]; k.family == f && !still {
			delete(w.robbed, k)
			if r.missed {
				severity.Notices(klog.FromContext(ctx)).Info("The rules of a pod are not missed any more: they are back, or the pod is gone", "family", f, "pod", w.name(k.attachment))
			}
		}
	}
	lost, last := false, w.followed[f]
	for a, lack := range lacks {
		k := robberyKey{f, a}
		r, known := w.robbed[k]
		if !known {
			r.since, r.inForce = now, cmp.Or(st.families[f].known.at, st.absence.lastRun)
		}
		r.lack = lack
		// What becomes of it later shows in the file. Other pods may come to their end meanwhile.
		size := len(lack.Rules) + len(lack.Chains)
		switch grown := size > r.size; {
		case r.by != robberUnknown:
		case lack.Ahead:
			r.by = robberOther
		case grown:
			r.by = d.robberOf(ctx, st, f, lack, last, !known)
		}
		r.size = size
		if r.by == robberUnknown && w.known[a].removedAgain(f, r.since) {
			r.by = robberOwner // it is removed again: its DEL may fail time after time
			severity.Warnings(klog.FromContext(ctx)).Info("The rules of a pod were removed once more by a process that is not known; they are not put back", "family", f, "pod", w.name(a))
		}
		missed := r.by == robberUnknown && now.Sub(r.since) >= d.cfg.JumpGrace
		if missed && !r.missed {
			severity.Warnings(klog.FromContext(ctx)).Info("Rules of a running pod are missing; canaryd waits for their owner, and then puts them back",
				"family", f, "pod", w.name(a), "rules", size, "missingFor", now.Sub(r.since).Round(time.Second), "until", r.since.Add(d.robberyGrace(r)).UTC().Format(time.RFC3339))
		}
		r.missed = missed
		if w.robbed == nil {
			w.robbed = map[robberyKey]robbery{}
		}
		w.robbed[k] = r
		lost = lost || d.robbedFor(r, now)
	}
	if !looked {
		return lost // the next read that looks has all since the last one that did
	}
	if w.followed == nil {
		w.followed = map[rules.Family]culprit.Read{}
	}
	w.followed[f] = culprit.Read{Digest: st.families[f].examined.digest, At: st.families[f].examined.at}
	return lost
}

// followWritten is followRobberies for the read behind a write, which may be the first to show what
// another process removed meanwhile. Nothing else would examine it.
func (d *Daemon) followWritten(ctx context.Context, st *state, id rules.TableID, nat rules.Section, now time.Time) {
	d.followRobberies(ctx, st, id.Family, d.supplement(st, id, nat), canary.Finding{Verdict: canary.Changed}, now)
	if _, due := d.keptFor(st, id.Family); !due.IsZero() {
		st.families[id.Family].examined.plan(pace.Latest(due, now))
	}
}

// living yields the pods that are known to live.
func (w *podWatch) living(yield func(protect.Attachment) bool) {
	for a := range w.known {
		if w.lives(a) && !yield(a) {
			return
		}
	}
}

// lives reports whether a pod has a file that goes with it.
func (w *podWatch) lives(a protect.Attachment) bool {
	k, ok := w.known[a]
	return ok && k.gone.IsZero() && k.Ends
}

// removedAgain reports whether a replay had put rules of it back in that family, not long before
// they were seen to be missing.
func (k attached) removedAgain(f rules.Family, since time.Time) bool {
	back := k.returnedTo[f]
	return !back.IsZero() && since.After(back) && since.Sub(back) < returnedFor
}

// robberyGrace returns for how long a pod's rules are missing before they are lost.
func (d *Daemon) robberyGrace(r robbery) time.Duration {
	if r.by == robberOther {
		return d.cfg.JumpGrace
	}
	return max(delLasts, d.cfg.JumpGrace)
}

// robbedFor reports whether rules that are missing are lost.
func (d *Daemon) robbedFor(r robbery, now time.Time) bool {
	return r.by != robberOwner && now.Sub(r.since) >= d.robberyGrace(r)
}

// robbedNow returns the pods of each family whose rules are lost.
func (d *Daemon) robbedNow(st *state, now time.Time) map[rules.Family]map[protect.Attachment]bool {
	all := map[rules.Family]map[protect.Attachment]bool{}
	for k, r := range st.pods.robbed {
		if d.robbedFor(r, now) && st.pods.lives(k.attachment) {
			if all[k.family] == nil {
				all[k.family] = map[protect.Attachment]bool{}
			}
			all[k.family][k.attachment] = true
		}
	}
	return all
}

// keptFor returns the pods whose rules stay in the generation although they are missing, and when
// the first of them is missed or lost; zero: none will be.
func (d *Daemon) keptFor(st *state, f rules.Family) (kept map[protect.Attachment]bool, due time.Time) {
	kept = map[protect.Attachment]bool{}
	for k, r := range st.pods.robbed {
		if k.family == f && r.by != robberOwner {
			kept[k.attachment] = true
			at := r.since.Add(d.robberyGrace(r))
			if missedAt := r.since.Add(d.cfg.JumpGrace); !r.missed {
				at = pace.Earliest(at, missedAt)
			}
			due = pace.Earliest(due, at)
		}
	}
	return kept, due
}

// missedIn returns the robberies of a table that the node is not healthy for, by pod.
func (w *podWatch) missedIn(id rules.TableID) map[protect.Attachment]robbery {
	if id.Name != rules.Nat || len(w.robbed) == 0 {
		return nil
	}
	list := map[protect.Attachment]robbery{}
	for k, r := range w.robbed {
		if k.family == id.Family && r.missed && w.lives(k.attachment) {
			list[k.attachment] = r
		}
	}
	return list
}

// addTo adds it to what a table lost. want is what the generation has.
func (r robbery) addTo(lost *reload.Lost, want rules.Section) {
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

// robberOf returns what is known of the processes that took from these chains since the read
// before: a plugin among them is taken for the one that did it. whole: the read before showed all
// rules of the pod.
func (d *Daemon) robberOf(ctx context.Context, st *state, f rules.Family, lack protect.Lack, before culprit.Read, whole bool) robber {
	q := d.inquire(ctx)
	chains := slices.Clone(lack.Chains)
	for _, h := range lack.Rules {
		chains = append(chains, h.Chain)
	}
	by, takings := q.TakersOf(f.Table(rules.Nat), before, culprit.Read{Digest: st.families[f].examined.digest}, chains)
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

// wentAhead reports whether a rule went before the chain that it led to: portmap flushes the chain
// first. Rules of other pods stand next to it, so each commit that took from there counts.
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
