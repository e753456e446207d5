package daemon

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// missingWitnesses returns a nonce for each family whose witness does not stand.
func (d *Daemon) missingWitnesses(st *state) (map[tableid.Family]string, error) {
	missing := map[tableid.Family]string{}
	for _, family := range st.native.families() {
		nonce, err := d.cfg.Native.Kernel.Witness(family)
		if err != nil {
			return nil, err
		}
		if st.native.witness[family] = nonce; nonce == "" {
			missing[family] = string(canary.NewNonce())
		}
	}
	return missing, nil
}

// witnessesDue plans to plant witnesses where one does not stand.
func (d *Daemon) witnessesDue(st *state) {
	for _, family := range st.native.families() {
		if st.native.witness[family] == "" {
			st.native.plantAt = earliest(st.native.plantAt, time.Now())
		}
	}
}

// plantWitnesses plants the witnesses that do not stand.
func (d *Daemon) plantWitnesses(ctx context.Context, st *state) {
	r := &st.native
	r.plantAt = time.Time{}
	err := d.plantNow(ctx, st)
	if errors.Is(err, nft.ErrStale) {
		r.plantAt = time.Now().Add(firstTry)
		return
	}
	if err != nil {
		r.plantAt = time.Now().Add(d.cfg.PollInterval)
	}
	r.planted.report(ctx, err, "A witness could not be planted; canaryd may take a flush of the ruleset for an owner that deletes its table")
}

func (d *Daemon) plantNow(ctx context.Context, st *state) error {
	r := &st.native
	genid, err := d.cfg.Native.Kernel.Genid()
	if err == nil {
		err = d.hearNative(ctx, st, genid)
	}
	if err != nil {
		return err
	}
	missing, err := d.missingWitnesses(st)
	if err == nil && len(missing) > 0 {
		_, err = d.cfg.Native.Kernel.Write(genid, nil, missing)
	}
	if err != nil {
		return err
	}
	maps.Copy(r.witness, missing)
	for id, t := range r.tables {
		if !t.lost() && !t.missed { // it stood when the witness did
			t.witness = r.witness[id.Family]
		}
	}
	if len(missing) > 0 {
		r.disk.saveAt = time.Now() // after a kill the next start would take them for another flush's
	}
	r.planReads(time.Now())
	return nil
}
