package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// In a full sync kube-proxy in nftables mode reads the sets of its table one by one, and then
// writes all of it. If a flush deleted the table and canaryd puts it back between two of these
// reads, kube-proxy does not know the content of the first sets. An address of a service that it
// has removed since would stay there until the next full sync, an hour later. So canaryd makes
// kube-proxy do another one.

// followReplay takes a commit to a table that may be the first one of its owner since a replay. A
// full sync that ends with it may have begun before the replay. If it is another commit, kube-proxy
// reads the table after the replay.
func (d *Daemon) followReplay(t *nativeTable, id tableid.TableID, deed *native.Deed, c nft.Commit) {
	if t == nil || !t.replayed || id.Name != owners.ProxyTable || deed.Deleted {
		return
	}
	switch d.committer(id, c) {
	case native.NotOwner, native.Shell:
		return
	}
	if deed.FullSync(t.want) {
		t.owesFullSync(time.Now())
	}
	t.replayed = false
}

// owesFullSync makes canaryd request a full sync, if kube-proxy may have begun the last one before
// a replay: followReplay heard that, or missed its commit.
func (t *nativeTable) owesFullSync(now time.Time) {
	if t.replayed && t.want.ID.Name == owners.ProxyTable {
		t.replayed, t.fullSync = false, pace.Retry{At: now}
	}
}

// fullSyncAt returns when requestFullSyncs is due; zero: no full sync is to be requested.
func (r *nativeRealm) fullSyncAt() (at time.Time) {
	for _, t := range r.tables {
		at = pace.Earliest(at, t.fullSync.At)
	}
	return at
}

// requestFullSyncs requests the full syncs that are due. The chain and the element that it adds
// for that are learned like an owner's, and kube-proxy deletes them.
func (d *Daemon) requestFullSyncs(ctx context.Context, st *state) {
	r, log := &st.native, klog.FromContext(ctx)
	genid, heard := d.hearNow(ctx, st)
	for _, id := range r.ids() {
		t, now := r.tables[id], time.Now()
		if !pace.Due(t.fullSync.At, now) {
			continue
		}
		err := heard
		if err == nil {
			err = d.cfg.Native.Kernel.RequestFullSync(genid, t.want)
		}
		if errors.Is(err, nft.ErrStale) || heard != nil {
			t.fullSync.Failed(err, now)
			continue
		}
		t.fullSync = pace.Retry{}
		if err != nil {
			severity.Warnings(log).Error(err, "kube-proxy could not be asked for a full sync", "table", id.NFT())
			continue
		}
		genid = nft.Following(genid)
		t.touch(now, now, false)
		severity.Notices(log).Info("kube-proxy may have read its table before the replay; a chain in it makes it do a full sync", "table", id.NFT(), "chain", native.SyncChain)
	}
	r.planReads(time.Now())
}
