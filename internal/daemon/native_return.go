package daemon

import (
	"context"
	"errors"
	"time"

	"github.com/canaryd/canaryd/internal/accepted"
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeGeneration returns the stored generation of a native table with that ID. found is false
// if there is none; then the ID is perhaps that of iptables' rules.
func (d *Daemon) nativeGeneration(id string) (g nativestore.Generation, found bool, err error) {
	if !d.guardsNative() || d.cfg.Native.Store == nil {
		return nativestore.Generation{}, false, nil
	}
	g, err = d.cfg.Native.Store.Read(id)
	if errors.Is(err, reload.ErrNothingStored) {
		return nativestore.Generation{}, false, nil
	}
	return g, true, err
}

// returnNative gives a native table the content of a stored generation, because an operator
// wants it. From then on that content ought to be in force.
func (d *Daemon) returnNative(ctx context.Context, st *state, r api.RestoreRequest, g nativestore.Generation) (api.RestoreReply, error) {
	if err := d.cfg.Native.Store.MayRestore(g, d.cfg.Native.Protects); err != nil {
		return api.RestoreReply{}, err
	}
	ctx, finished := finishing(ctx)
	defer finished()
	if !r.DryRun {
		d.nativeByItself(ctx, st)
	}
	if st.native.asleep {
		if _, err := d.awaken(st, nil); err != nil {
			return api.RestoreReply{}, err
		}
	}
	done, err := d.cfg.Native.Store.Return(d.cfg.Native.Kernel, g, d.cfg.Uptime, r, st.baseline.Base)
	reply := done.Reply
	reply.Baseline = st.baseline.Name()
	if err != nil || done.Proof == nil && !done.Wrote {
		return reply, err
	}
	if gone, any := done.Removal(g, time.Now()); any {
		d.takeRemoval(ctx, st, gone, reply)
	}
	known := done.Proved()
	if known {
		if err := d.hearNative(ctx, st, done.Proof.Genid); err != nil {
			known = false
			d.nativeUnknown(ctx, st, err)
		}
	}
	if done.Wrote && done.Proved() {
		onrequest.LogRestored(ctx, reply, "table", g.Name, "detail", reply.Native[0].Detail)
	}
	if known {
		d.adoptReturned(ctx, st, g.Table.ID, done)
		d.endBack(ctx, st, nil)
	} else {
		st.native.readLater(g.Table.ID, time.Now())
	}
	st.native.planReads(time.Now())
	d.witnessesDue(st)
	return reply, nil
}

// readLater makes the next read judge a table, also without a commit to it: a restore wrote it,
// and no proof showed its content.
func (r *nativeRealm) readLater(id tableid.TableID, now time.Time) {
	if t := r.tables[id]; t != nil {
		t.touch(now, now, true)
	} else {
		r.fresh = true
	}
}

// adoptReturned makes the content of a restored table the content that ought to be in force.
// done has the proof, and the parts that the kernel refused.
func (d *Daemon) adoptReturned(ctx context.Context, st *state, id tableid.TableID, done nativestore.Returned) {
	r, seen := &st.native, nativeSight{Ruleset: done.Proof}
	if t := r.tables[id]; t != nil {
		_, known := seen.Tables[id].Policies()
		t.policies = accepted.Policies{Known: known}
	}
	if r.tables[id] == nil {
		r.tables[id] = &nativeTable{}
		d.adopt(ctx, st, seen.learned(id))
	} else {
		d.adoptNative(ctx, st, id, seen, native.Finding{Verdict: native.Intact, Why: "an operator restored it"})
	}
	if done.Wrote {
		r.tables[id].made = reload.MadeRestored
		d.setQuarantine(ctx, st, id, nil, done.Held, quarantine.Replay)
	}
	r.disk.changed(time.Now())
}
