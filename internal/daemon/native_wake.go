package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/nft"
)

// wakeNative reports whether there is a table that is to be guarded. Until then a preset costs
// this one query: canaryd hears no commits and reads no table. Tables that an earlier run
// guarded are looked for in any case.
func (d *Daemon) wakeNative(ctx context.Context, st *state) bool {
	r, now := &st.native, time.Now()
	wanted := func(t nft.Table) bool { return d.cfg.Native.Protects(t.Family.Table(t.Name)) }
	if len(r.tables) > 0 {
		wanted = nil
	} else if next := r.asked.Add(wakeEvery); now.Before(next) {
		r.lookAt = next
		return false
	}
	r.asked, r.hinted = now, time.Time{}
	awake, err := d.awaken(st, wanted)
	interrupted := errors.Is(err, nft.ErrInterrupted)
	if r.torn++; !interrupted {
		r.torn = 0
	}
	switch {
	case interrupted && r.torn < interruptedMost:
		r.lookAt = now.Add(wakeEvery)
		return false
	case err != nil:
		d.nativeUnknown(ctx, st, err)
		return false
	}
	if r.trouble.Over() {
		severity.Notices(klog.FromContext(ctx)).Info(tablesRead, "tables", "native")
	}
	if !awake {
		r.begun, r.known = true, now
	}
	return awake
}

// awaken opens the kernel for native tables, if there is a wanted one or wanted is nil. Then
// each table is read. Without nf_tables, a nil wanted is an error.
func (d *Daemon) awaken(st *state, wanted func(nft.Table) bool) (awake bool, err error) {
	awake, err = d.cfg.Native.Wake(wanted)
	if err == nil && !awake && wanted == nil {
		err = nativestore.ErrNoNFTables
	}
	if err != nil || !awake {
		return false, err
	}
	d.cfg.Native.Kernel.Suspect(d.suspects)
	r := &st.native
	r.asleep, r.begun, r.all = false, false, true
	return true, nil
}

// nativeUnknown notes that the state of native tables is not known now, because of err: the
// status shows it, and a look follows. It puts nothing back.
func (d *Daemon) nativeUnknown(ctx context.Context, st *state, err error) {
	if st.native.trouble.Met(err, time.Now()) {
		klog.FromContext(ctx).Error(err, tablesUnread, "tables", "native")
	}
	st.native.lookAgain(ctx, d.cfg.PollInterval)
}
