package kubeproxy

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A flush is one way to take kube-proxy's rules, with its memory of one namespace.
type flush struct {
	name string
	do   func(ctx context.Context, s *space) error
}

// flushes returns all flushes that can hit a kube-proxy in that mode, a new list for each
// namespace.
func flushes(s *space, mode string) []flush {
	if mode == inNFTables {
		return nftablesFlushes()
	}
	var all []flush
	for _, one := range scenario.All() {
		if !one.On(s.programs.With) || one.Prepare != nil || one.Times > 1 {
			continue
		}
		all = append(all, flush{one.Name, func(ctx context.Context, s *space) error {
			return s.in(func() error { return one.Do(ctx, s.programs) })
		}})
	}
	return append(all,
		flush{"iptables -t nat -F KUBE-SERVICES", func(ctx context.Context, s *space) error {
			return s.in(func() error { return s.programs.Flush(ctx, rules.IPv4, rules.Nat, "KUBE-SERVICES") })
		}},
		flush{"iptables-restore < empty tables", func(ctx context.Context, s *space) error {
			return s.in(func() error { return scenario.Wipe(ctx, s.programs, rules.Families()...) })
		}},
		oldFile(func(ctx context.Context, s *space) (map[rules.Family]string, error) {
			saved := map[rules.Family]string{}
			return saved, s.in(func() (err error) {
				for _, family := range rules.Families() {
					saved[family], err = s.programs.Save(ctx, family)
					if err != nil {
						return err
					}
				}
				return nil
			})
		}, func(ctx context.Context, s *space, saved map[rules.Family]string) error {
			return s.in(func() (err error) {
				for family, text := range saved {
					err = errors.Join(err, s.programs.Restore(ctx, family, text))
				}
				return err
			})
		}))
}

// fileAge is the least age of a saved file at its restore. A file younger than 10 s counts as
// its owner's decision while its owner keeps writing (docs/guarantees.md).
const fileAge = 15 * time.Second

// errNothingDone means that nothing was flushed this time.
var errNothingDone = errors.New("no saved file is old enough to be restored")

// oldFile saves, and restores the file once it is old enough. In between it does nothing.
func oldFile[T any](save func(context.Context, *space) (T, error), restore func(context.Context, *space, T) error) flush {
	var saved T
	var at time.Time
	return flush{"restores a file that is 15 s old", func(ctx context.Context, s *space) (err error) {
		if at.IsZero() {
			if saved, err = save(ctx, s); err == nil {
				at, err = time.Now(), errNothingDone
			}
			return err
		}
		if time.Since(at) < fileAge {
			return errNothingDone
		}
		at = time.Time{}
		return restore(ctx, s, saved)
	}}
}

// A firewall of the node's administrator, as in /etc/nftables.conf.
const firewall = `table inet filter {
	chain input { type filter hook input priority filter; policy accept; ct state established accept; }
	chain forward { type filter hook forward priority filter; policy accept; }
}
`

func nftablesFlushes() []flush {
	var all []flush
	nft := func(name string, scripts ...string) {
		all = append(all, flush{name, func(ctx context.Context, s *space) error {
			for _, script := range scripts {
				if _, err := s.run(ctx, script, "nft", "-f", "-"); err != nil {
					return err
				}
			}
			return nil
		}})
	}
	nft("nft flush ruleset", "flush ruleset\n")
	nft("nft flush ruleset ip", "flush ruleset ip\n")
	nft("systemctl reload nftables", "flush ruleset\n"+firewall)
	nft("systemctl restart nftables", "flush ruleset\n", "flush ruleset\n"+firewall)
	nft("nft flush table ip kube-proxy", "flush table ip kube-proxy\n")
	nft("nft flush table ip6 kube-proxy", "flush table ip6 kube-proxy\n")
	nft("nft flush chain nat-prerouting", "flush chain ip kube-proxy nat-prerouting\n")
	nft("nft flush chain services", "flush chain ip kube-proxy services\n")
	nft("nft flush map service-ips", "flush map ip kube-proxy service-ips\n")
	nft("nft flush set cluster-ips", "flush set ip6 kube-proxy cluster-ips\n")
	nft("nft delete table ip kube-proxy", "delete table ip kube-proxy\n")
	return append(all, oldFile(func(ctx context.Context, s *space) (string, error) {
		v4, err := s.run(ctx, "", "nft", "-s", "list", "table", "ip", "kube-proxy")
		v6, err6 := s.run(ctx, "", "nft", "-s", "list", "table", "ip6", "kube-proxy")
		return v4 + v6, errors.Join(err, err6)
	}, func(ctx context.Context, s *space, saved string) error {
		_, err := s.run(ctx, "flush ruleset\n"+saved, "nft", "-f", "-")
		return err
	}))
}

// A blow is a flush that happened, in all of its namespaces.
type blow struct {
	name       string
	start, end time.Time
}

// A hand makes the same flush in several namespaces at the same time.
type hand struct {
	spaces []*space
	lists  [][]flush
	rng    *rand.Rand
	blows  []blow
}

func newHand(rng *rand.Rand, mode string, spaces ...*space) *hand {
	h := &hand{spaces: spaces, rng: rng}
	for _, s := range spaces {
		h.lists = append(h.lists, flushes(s, mode))
	}
	return h
}

// strike makes one flush, or none if none is possible. During a write of kube-proxy or canaryd
// the flusher's program may fail, as for an administrator. The attempt still counts.
func (h *hand) strike(ctx context.Context) (errs []error) {
	i, start := h.rng.IntN(len(h.lists[0])), time.Now()
	failed := make(chan error)
	for n, s := range h.spaces {
		go func() { failed <- h.lists[n][i].do(ctx, s) }()
	}
	idle := 0
	for range h.spaces {
		switch err := <-failed; {
		case errors.Is(err, errNothingDone):
			idle++
		case err != nil:
			errs = append(errs, err)
		}
	}
	if idle == len(h.spaces) {
		return errs
	}
	h.blows = append(h.blows, blow{h.lists[0][i].name, start, time.Now()})
	return errs
}

// lateMost is the greatest delay of canaryd's notice on a busy machine: 2.5 s were seen at a
// load of 36 on two cores. In a storm nearly every record then has some flush; the calm time
// shows false ones.
const lateMost = 10 * time.Second

// during returns a flush that a record may be about, or nil. The flush was between the first
// evidence and the verdict, or had just ended. On legacy the first evidence may precede the
// flush: an owner's lock after which canaryd had not looked yet.
func (h *hand) during(evidence, verdict time.Time) *blow {
	for i := range h.blows {
		b := &h.blows[i]
		if !verdict.Before(b.start) && evidence.Before(b.end.Add(lateMost)) {
			return b
		}
	}
	return nil
}
