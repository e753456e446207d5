package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Sets saves ipsets, and makes the objects other than chains that rules depend on:
// *iptables.Sets or *iptablestest.Sets.
type Sets interface {
	reload.Supplier
	// Save returns the named ipsets that exist, with their members. The error is about ipsets
	// that cannot be kept.
	Save(ctx context.Context, names []string) (map[string]iptables.Set, error)
}

// sets has the ipsets that rules depend on.
type sets struct {
	known   map[string]iptables.Set // as captured
	names   []string                // sets that the generation names
	edition int                     // of the generation that names are of
	of      rules.Generation        // that generation
	trouble pace.Trouble            // why they could not be captured
	unkept  bool                    // the disk lacks them
}

// recallSets takes up the ipsets that the last run knew: a replay puts back a set that is
// missing.
func (d *Daemon) recallSets(ctx context.Context, st *state) {
	var err error
	if st.sets.known, err = d.cfg.Store.LoadSets(); err != nil {
		pace.Unusable(klog.FromContext(ctx), err).Error(err, "The stored ipsets are not used; canaryd cannot put back an ipset that is missing now")
	}
}

// captureSets reads the ipsets that the generation's rules name, also those of a loss that waits
// for a decision. save calls it: with all before it writes (once a minute, and at the end), and
// else only for sets that are not known yet. Members change without a change of rules. A set
// that is missing now is kept as it was. If a flusher destroyed it, it must come back, and its
// owner destroys it only after the rules.
func (d *Daemon) captureSets(ctx context.Context, st *state, all bool) {
	if d.cfg.Sets == nil || !all && st.sets.edition == st.generation.edition {
		return
	}
	if st.sets.edition != st.generation.edition {
		before, want := st.sets.of, st.want()
		if len(st.sets.names) > 0 {
			before = nil // its rules named sets, and are searched again
		}
		st.sets.edition, st.sets.names, st.sets.of = st.generation.edition, nil, want
		for id, s := range want {
			for r := range s.NewRules(before[id]) {
				st.sets.names = append(st.sets.names, r.Needs().Sets...)
			}
		}
		for _, s := range st.decision.lost() {
			st.sets.names = append(st.sets.names, s.Needs().Sets...)
		}
		slices.Sort(st.sets.names)
		st.sets.names = slices.Compact(st.sets.names)
	}
	unknown := slices.ContainsFunc(st.sets.names, func(name string) bool { _, ok := st.sets.known[name]; return !ok })
	if len(st.sets.names) == 0 || !all && !unknown {
		return
	}
	found, err := d.cfg.Sets.Save(ctx, st.sets.names)
	next := map[string]iptables.Set{}
	keep := slices.Clone(st.sets.names)
	for i := 0; i < len(keep); i++ {
		set, ok := found[keep[i]]
		if !ok {
			set, ok = st.sets.known[keep[i]]
		}
		if _, known := next[keep[i]]; ok && !known {
			next[keep[i]] = set
			keep = append(keep, set.Lists()...)
		}
	}
	st.sets.unkept = st.sets.unkept || !maps.EqualFunc(next, st.sets.known, equalSets)
	st.sets.known = next
	if st.sets.unkept && d.cfg.Store != nil {
		failed := d.cfg.Store.SaveSets(next)
		d.countStateError(failed)
		st.sets.unkept, err = failed != nil, errors.Join(err, failed)
	}
	st.sets.trouble.Report(pace.Warnings(ctx), err, "Some ipsets that protected rules name are not stored; canaryd cannot put them back")
}

func equalSets(a, b iptables.Set) bool {
	return a.Name == b.Name && a.Create == b.Create && slices.Equal(a.Members, b.Members)
}
