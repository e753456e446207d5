package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Begin begins a guarded read and write; see Session. On legacy it takes the xtables lock and
// returns ErrLocked if another process keeps it for Config.LockWait. On nft it never waits. The
// Session must be closed.
func (k *Kernel) Begin(ctx context.Context) (Session, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	base := session{kernel: k, noted: map[rules.Family]uint64{}, read: map[rules.Family]bool{}, lock: -1}
	if k.info.Backend == NFT {
		return &genidSession{session: base}, nil
	}
	lock, err := takeLock(ctx, k.cfg.LockFile, k.cfg.LockWait)
	if err != nil {
		return nil, err
	}
	base.lock = lock
	return &contentSession{session: base, left: map[rules.Family]Snapshot{}}, nil
}

// ErrClosed is the error of a Session's methods after its Close.
var ErrClosed = errors.New("the session is closed")

// A session is the common part of both kinds of Session.
type session struct {
	kernel *Kernel
	// noted has, for each family, the digest that its next Restore must find. A family without
	// an entry must be read first.
	noted  map[rules.Family]uint64
	read   map[rules.Family]bool // which families were read before
	lock   int                   // -1 if none is held
	closed bool
}

// readBy reads a family for Read of both kinds of Session, and notes its digest for the next
// guard. Moved is set if another process wrote since the noted one, or a failure forgot that.
func (s *session) readBy(ctx context.Context, family rules.Family, read func(context.Context, rules.Family) (Snapshot, error)) (Snapshot, error) {
	if s.closed {
		return Snapshot{}, ErrClosed
	}
	want, noted := s.noted[family]
	delete(s.noted, family)
	snapshot, err := read(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	snapshot.Moved = s.read[family] && (!noted || snapshot.Digest != want)
	s.noted[family], s.read[family] = snapshot.Digest, true
	return snapshot, nil
}

// Close implements Session. On legacy it releases the xtables lock.
func (s *session) Close() error {
	if s.closed {
		return nil
	}
	s.closed = true
	if s.lock < 0 {
		return nil
	}
	return unix.Close(s.lock)
}

// now returns the current digest for guard and check; ErrClosed after Close.
func (s *session) now(ctx context.Context, family rules.Family) (uint64, error) {
	if s.closed {
		return 0, ErrClosed
	}
	if err := s.kernel.ready(ctx, family); err != nil {
		return 0, err
	}
	return s.kernel.reader.digest(ctx, family)
}

// guard returns the current digest, or ErrStale if it is not the noted one: another process
// wrote since the last Read or Restore. A Restore calls it right before it writes.
func (s *session) guard(ctx context.Context, family rules.Family) (uint64, error) {
	got, err := s.now(ctx, family)
	if err != nil {
		return 0, err
	}
	return got, s.isNoted(family, got)
}

// isNoted returns ErrStale if a digest is not the noted one.
func (s *session) isNoted(family rules.Family, got uint64) error {
	want, ok := s.noted[family]
	if !ok {
		return fmt.Errorf("%w: %v was not read since the last failure", nft.ErrStale, family)
	}
	if got != want {
		return nft.ErrStale
	}
	return nil
}

// A genidSession is guarded by nf_tables' genid, which counts every commit in the network
// namespace, for any family.
type genidSession struct {
	session
	ahead *encodedAhead // of the next Restore; nil if it was not prepared
	rider *Rider        // of the next Restore; nil if there is none
}

// Read implements Session. The genid is cheap enough to read it once more, which shows writes
// during this Read.
func (s *genidSession) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	snapshot, err := s.readBy(ctx, family, s.kernel.Read)
	if err != nil {
		return Snapshot{}, err
	}
	after, err := s.kernel.reader.digest(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	snapshot.Moved = snapshot.Moved || after != snapshot.Digest
	return snapshot, nil
}

// Writes implements Session.
func (s *genidSession) Writes(rule rules.Rule) bool {
	_, opaque := rule.Opaque()
	return !opaque || rule.HasBytes()
}

// Prepare implements Session. It encodes for the state that was read. If another process commits
// meanwhile, Restore finds that out.
func (s *genidSession) Prepare(_ context.Context, payloads ...Payload) {
	s.ahead.stop()
	s.ahead = s.kernel.encodeAhead(payloads)
	s.ahead.begin()
}

// Carry implements Session.
func (s *genidSession) Carry(r *Rider) {
	copied := *r // its genid follows canaryd's own commits
	s.rider = &copied
}

// Close implements Session. It also ends the encoding that Prepare began.
func (s *genidSession) Close() error {
	s.ahead.stop()
	s.ahead = nil
	return s.session.Close()
}

// Restore implements Session.
func (s *genidSession) Restore(ctx context.Context, payloads ...Payload) map[rules.Family]Written {
	return s.writeAll(ctx, payloads, false)
}

// RestoreAnyway implements Session.
func (s *genidSession) RestoreAnyway(ctx context.Context, payloads ...Payload) map[rules.Family]Written {
	written := s.writeAll(ctx, payloads, true)
	for family, w := range written {
		w.Raced = true
		written[family] = w
	}
	return written
}

// writeAll writes one payload after the other, for Restore and RestoreAnyway (anyway). Each is
// encoded while the kernel handles the one before, unless Prepare did it.
func (s *genidSession) writeAll(ctx context.Context, payloads []Payload, anyway bool) map[rules.Family]Written {
	ahead := s.ahead
	s.ahead = nil
	defer func() { s.rider = nil }()
	if !ahead.of(payloads) {
		ahead.stop()
		ahead = s.kernel.encodeAhead(payloads)
	}
	defer ahead.stop()
	return EachStage(payloads, func(stage int, payload Payload) map[rules.Family]Written {
		encode := func(due Payload) *directBatch { return ahead.batch(stage, due) }
		if anyway {
			// A batch that was encoded ahead may name rules that were deleted meanwhile, and the
			// current genid would not show that.
			encode = s.kernel.encode
		}
		return s.write(ctx, payload, encode, !anyway && stage == len(payloads)-1, anyway)
	})
}

// write writes one payload: the directly writable part of all families in one transaction, then
// each family's rest as text. encode makes the batch, or returns a prepared one. rides lets the
// rider join the transaction. anyway ignores writes since the read.
func (s *genidSession) write(ctx context.Context, payload Payload, encode func(Payload) *directBatch, rides, anyway bool) map[rules.Family]Written {
	written, due, byMarks := make(map[rules.Family]Written, len(payload)), Payload{}, payload.byMarks()
	var genid uint64
	for _, family := range slices.Sorted(maps.Keys(payload)) {
		before, err := s.check(ctx, family, anyway || byMarks)
		if err != nil {
			written[family] = Written{Err: err}
			continue
		}
		if len(due) == 0 {
			// If a process commits before the next family's check, this family is stale, and so
			// is the batch.
			genid = before
		}
		due[family] = payload[family]
	}
	if len(due) == 0 {
		return written
	}
	batch, genid, endTrials, err := s.teach(ctx, encode(due), due, genid, anyway)
	defer endTrials()
	if byMarks && err == nil {
		genid, err = batch.byMarks(genid)
	}
	if err != nil {
		for family := range due {
			written[family] = Written{Err: err}
		}
		return written
	}
	var rider *Rider
	if rides && s.rider != nil && s.rider.Genid == uint32(genid) {
		rider = s.rider
	}
	direct := s.writeDirectly(batch, due, genid, rider, anyway)
	for family := range due {
		written[family] = Written{Err: direct.err}
	}
	if direct.err != nil {
		return written
	}
	s.moved(direct.moved)
	for _, family := range slices.Sorted(maps.Keys(due)) {
		var w Written
		if left := direct.left[family]; len(left) > 0 {
			w = s.writeRest(ctx, family, left, direct.detour[family], anyway || len(direct.wrote[family]) > 0)
		}
		if w.At.IsZero() && (w.Err == nil || len(direct.wrote[family]) > 0) {
			w.At = direct.at
		}
		w.Direct, w.Detour, w.Kernel = direct.wrote[family], direct.detour[family], direct.took
		written[family] = w
	}
	return written
}

// check is guard for write and writeRest; with anyway it notes and returns the current genid.
func (s *genidSession) check(ctx context.Context, family rules.Family, anyway bool) (uint64, error) {
	if !anyway {
		return s.guard(ctx, family)
	}
	now, err := s.now(ctx, family)
	if err == nil {
		s.noted[family] = now
	}
	return now, err
}

// writeDirectly sends the batch. With anyway, a batch that is stale is sent again without a
// guard. It is still atomic, and it names existing rules by their handles. iptables-restore
// would search longer for a quiet moment. A guarded transaction with a refused rule is not
// written as text: the error names the rule.
func (s *genidSession) writeDirectly(batch *directBatch, due Payload, genid uint64, rider *Rider, anyway bool) directResult {
	direct := s.kernel.sendDirectly(batch, due, uint32(genid), rider)
	if anyway && errors.Is(direct.err, nft.ErrStale) {
		if direct = s.kernel.sendDirectly(s.kernel.encode(due), due, nft.NoGuard, nil); errors.Is(direct.err, nft.ErrStale) {
			direct = directResult{left: due} // iptables reads the set's number itself
		}
	} else if !anyway && direct.refused != nil {
		if named := s.kernel.named(direct.sent, due, uint32(genid), direct.refused); named != nil {
			direct = directResult{err: named}
		}
	}
	return direct
}

// writeRest writes as text the scripts that the transaction left out, for the reason detour.
// begun reports that the transaction wrote other tables of the family. Then a stale read is
// found too late, and counts as raced.
func (s *genidSession) writeRest(ctx context.Context, family rules.Family, scripts []Script, detour error, begun bool) Written {
	if err := Scripts(scripts).checkText("nf_tables"); err != nil {
		err.Stderr = oneLine([]error{detour, errors.New(err.Stderr)}).Error()
		if errors.Is(detour, ErrNoSet) {
			err.Reason = ReasonMissingSet
		}
		return Written{Err: err}
	}
	before, err := s.guard(ctx, family)
	raced := begun && errors.Is(err, nft.ErrStale)
	if raced {
		before, err = s.check(ctx, family, true)
	}
	if err != nil {
		return Written{Raced: raced, Err: err}
	}
	may, refused := s.kernel.textual(family, scripts)
	w := Written{}
	if len(may) > 0 || refused == nil {
		w = s.restoreByText(ctx, family, may, before)
	}
	if w.Err == nil && refused != nil {
		w.Err = refused
	}
	w.Raced = w.Raced || raced
	return w
}

// moved adds canaryd's own commits to the noted genids, which the next guard compares.
func (s *genidSession) moved(by uint32) {
	if s.rider != nil {
		s.rider.Genid += by
	}
	for f, id := range s.noted {
		s.noted[f] = uint64(uint32(id) + by) // the counter wraps
	}
}

// restoreByText writes one family; before is the genid right before.
//
// It counts canaryd's own commits: one for each script that writes anything. Additional commits
// were of other processes. A script that changes nothing makes no commit, so a foreign commit at
// that moment can remain unseen. A script that renews marks always writes. A script that only
// puts back jumps or chains writes, too, unless another process did so first.
func (s *genidSession) restoreByText(ctx context.Context, family rules.Family, scripts []Script, before uint64) Written {
	text := Scripts(scripts)
	if err := s.kernel.restore(ctx, family, text); err != nil {
		// The number of canaryd's own commits is unknown, so everything must be read again.
		clear(s.noted)
		return Written{Err: err}
	}
	at := time.Now()
	after, err := s.kernel.reader.digest(context.WithoutCancel(ctx), family)
	if err != nil {
		clear(s.noted)
		return Written{At: at, Raced: true, Err: fmt.Errorf("the rules were written, but: %w", err)}
	}
	moved := uint32(after) - uint32(before) // the counter wraps
	if moved > text.commits() {
		clear(s.noted)
		return Written{At: at, Raced: true}
	}
	s.moved(moved)
	return Written{At: at}
}

// A contentSession is guarded by the xtables lock. A program may ignore or move that lock, so it
// is also guarded by the digest of the family's whole content.
type contentSession struct {
	session
	// left is the state after canaryd's own restores, until the next Read. If a process ignores
	// the lock after that, a probe shows another digest.
	left map[rules.Family]Snapshot
}

// Read implements Session. Under the lock it uses the walk after the last restore, if there is
// one.
func (s *contentSession) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	seen, left := s.left[family]
	delete(s.left, family)
	return s.readBy(ctx, family, func(ctx context.Context, family rules.Family) (Snapshot, error) {
		if err := s.kernel.ready(ctx, family); err != nil || left {
			return seen, err
		}
		return s.kernel.walk(ctx, family)
	})
}

// Prepare implements Session. It does nothing: a table is changed as it is read.
func (s *contentSession) Prepare(context.Context, ...Payload) {}

// Carry implements Session: there is no transaction to ride in.
func (s *contentSession) Carry(*Rider) {}

// Restore implements Session. A write of a process that ignores the lock during the restore
// itself looks like canaryd's own, and does not count as raced.
func (s *contentSession) Restore(ctx context.Context, payloads ...Payload) map[rules.Family]Written {
	return InStages(payloads, func(family rules.Family, scripts []Script) Written {
		digest, sums, err := s.sums(ctx, family)
		if err == nil {
			err = s.isNoted(family, digest)
		}
		if err != nil {
			delete(s.left, family)
			return Written{Err: err}
		}
		return s.write(ctx, family, scripts, s.directly(family, scripts, sums))
	})
}

// RestoreAnyway implements Session.
func (s *contentSession) RestoreAnyway(ctx context.Context, payloads ...Payload) map[rules.Family]Written {
	return InStages(payloads, func(family rules.Family, scripts []Script) Written {
		_, sums, err := s.sums(ctx, family)
		if err != nil {
			return Written{Raced: true, Err: err}
		}
		direct := s.directly(family, scripts, sums)
		for _, d := range direct {
			d.anyway = true
		}
		w := s.write(ctx, family, scripts, direct)
		w.Raced = true
		return w
	})
}

// sums returns the present digest, and the checksums of the family's tables.
func (s *contentSession) sums(ctx context.Context, family rules.Family) (uint64, map[rules.TableName]uint64, error) {
	if s.closed {
		return 0, nil, ErrClosed
	}
	if err := s.kernel.ready(ctx, family); err != nil {
		return 0, nil, err
	}
	return s.kernel.reader.(xtReader).sums(ctx, family)
}

// write writes one family for Restore and RestoreAnyway, and notes its content for the next
// guard and Read. direct has, by index, the scripts to write by bytes (directly).
func (s *contentSession) write(ctx context.Context, family rules.Family, scripts []Script, direct map[int]*xtWrite) Written {
	delete(s.noted, family)
	delete(s.left, family)
	raced, err := s.restore(ctx, family, scripts, direct)
	w := Written{Raced: raced, Err: err}
	for _, i := range slices.Sorted(maps.Keys(direct)) {
		w.Detour = oneLine([]error{w.Detour, direct[i].refused})
	}
	if err != nil {
		return w
	}
	w.At = time.Now()
	after, err := s.kernel.walk(context.WithoutCancel(ctx), family)
	if err != nil {
		w.Err = fmt.Errorf("the rules were written, but: %w", err)
		return w
	}
	s.noted[family], s.left[family] = after.Digest, after
	return w
}
