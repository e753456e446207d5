package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// missingWitnesses returns a new nonce for each family whose witness is missing. A repair or
// plantNow writes these witnesses.
func (d *Daemon) missingWitnesses(ctx context.Context, st *state) (map[tableid.Family]string, error) {
	missing := map[tableid.Family]string{}
	for _, family := range st.native.families() {
		nonce, err := d.askWitness(ctx, &st.native, family)
		if err != nil {
			return nil, err
		}
		if nonce == "" {
			missing[family] = string(canary.NewNonce())
		}
	}
	return missing, nil
}

// askWitness reads the witness of a family, notes it, and returns its nonce; empty: there is
// none.
func (d *Daemon) askWitness(ctx context.Context, r *nativeRealm, family tableid.Family) (nonce string, err error) {
	w, err := d.cfg.Native.Kernel.Witness(family)
	if err != nil {
		return "", err
	}
	if w.Taken && !r.witness[family].Taken {
		severity.Warnings(klog.FromContext(ctx)).Info("Another process owns a table with the witness's name; canaryd gives its witness another name",
			"table", family.Table(native.WitnessName).NFT())
	}
	r.witness[family] = w
	return w.Nonce, nil
}

// witnessesDue plans to plant the missing witnesses, after reads and at the end of losses.
func (d *Daemon) witnessesDue(st *state) {
	for _, family := range st.native.families() {
		if st.native.witness[family].Nonce == "" {
			st.native.plantAt = pace.Earliest(st.native.plantAt, time.Now())
		}
	}
}

// plantWitnesses plants the missing witnesses.
func (d *Daemon) plantWitnesses(ctx context.Context, st *state) {
	r := &st.native
	r.plantAt = time.Time{}
	err := d.plantNow(ctx, st)
	if errors.Is(err, nft.ErrStale) {
		r.plantAt = time.Now().Add(pace.FirstTry)
		return
	}
	if err != nil {
		r.plantAt = time.Now().Add(d.cfg.PollInterval)
	}
	r.unplanted.Report(pace.Warnings(ctx), err, "A witness could not be planted; canaryd may take a flush of the ruleset for an owner that deletes its table")
}

// plantNow plants a witness in each family that lacks one, for plantWitnesses. It first hears
// all commits up to a genid, and the write is valid only at that genid (nft.ErrStale). So a
// table that is intact then was in force together with the witness.
func (d *Daemon) plantNow(ctx context.Context, st *state) error {
	r := &st.native
	genid, err := d.hearNow(ctx, st)
	if err != nil {
		return err
	}
	missing, err := d.missingWitnesses(ctx, st)
	if err == nil && len(missing) > 0 {
		_, err = d.cfg.Native.Kernel.Write(genid, nil, missing)
	}
	if err != nil {
		return err
	}
	r.planted(missing)
	for id, t := range r.tables {
		if !t.lost() && !t.missed { // it was in force together with the witness
			t.witness = r.witness[id.Family].Nonce
		}
	}
	if len(missing) > 0 {
		r.disk.saveAt = time.Now() // after a kill the next start would take them for another flush's
	}
	r.planReads(time.Now())
	return nil
}

// planted notes witnesses that were written, by their nonces: adopt gives them to the tables
// that it learns.
func (r *nativeRealm) planted(nonces map[tableid.Family]string) {
	for family, nonce := range nonces {
		r.witness[family] = native.NewWitness(nonce, r.witness[family].Taken)
	}
}

// loseWitness notes that a commit deleted a family's witness, and plans another one.
func (r *nativeRealm) loseWitness(family tableid.Family, now time.Time) {
	if w := r.witness[family]; w.Nonce != "" {
		r.witness[family] = native.Witness{Taken: w.Taken}
		r.plantAt = now
	}
}
