// Package page tests the page for people with a browser.
package page

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/testkit/browser"
	"github.com/canaryd/canaryd/internal/web"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

var (
	desk      = browser.Look{Width: 1280, Height: 900}
	deskDark  = browser.Look{Width: 1280, Height: 900, Dark: true}
	phone     = browser.Look{Width: 390, Height: 844, Phone: true}
	phoneDark = browser.Look{Width: 390, Height: 844, Phone: true, Dark: true}
)

// A stage serves the faces of a daemon whose status the test sets.
type stage struct {
	*testing.T
	*httptest.Server
	status atomic.Pointer[func() api.Status]
	dead   atomic.Bool  // the loop does not run
	broken atomic.Int32 // status of an answer without the page; 0: the page
}

func newStage(t *testing.T, status func() api.Status) *stage {
	t.Helper()
	st := &stage{T: t}
	st.show(status)
	registry := prometheus.NewRegistry()
	metrics.NewMetrics(registry, metrics.MetricsOptions{Families: rules.Families()})
	face := web.NewHTTPHandler(web.About{Node: "node-1", Version: "0.1.0"}, func() api.Status { return (*st.status.Load())() }, func() error {
		if st.dead.Load() {
			return errors.New("the loop has not turned for 12s")
		}
		return nil
	}, registry)
	st.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if code := st.broken.Load(); code != 0 {
			w.WriteHeader(int(code))
			fmt.Fprint(w, "<!DOCTYPE html><main>a login page</main>")
			return
		}
		face.ServeHTTP(w, r)
	}))
	t.Cleanup(st.Server.Close)
	return st
}

// show makes status the daemon's status. Each request calls it, so that a slow machine makes no
// time in it older.
func (st *stage) show(status func() api.Status) { st.status.Store(&status) }

// open opens the page.
func (st *stage) open(b *browser.Browser, look browser.Look) *tab {
	st.Helper()
	return open(st.T, b, st.URL+"/", look)
}

// healthyNode returns the status of a node on which nothing has happened since the start.
func healthyNode() api.Status {
	now := time.Now()
	s := api.Status{
		Mode: api.Heal, CanaryChain: "KUBE-CANARYD-CANARY",
		Backend:    api.Backend{Name: iptables.NFT, Version: "1.8.9", Reason: "kubelet's hint chain is in nft only"},
		Families:   map[rules.Family]api.Verdicts{},
		Generation: api.Generation{ID: "af31f3a40aee", Source: "snapshot", Captured: now.Add(-26 * time.Minute), Rules: 12460, Chains: 4147},
		Stored:     []api.StoredGeneration{{ID: "af31f3a40aee", Saved: now.Add(-26 * time.Minute)}, {ID: "0b1c2d3e4f50", Saved: now.Add(-90 * time.Minute)}},
		LastKnown:  now.Add(-time.Second),
	}
	for _, f := range rules.Families() {
		s.Families[f] = api.Verdicts{}
		for _, t := range protect.Always() {
			s.Families[f][t] = canary.Intact
		}
	}
	return s
}

// flush returns a record of that age.
func flush(id string, ago time.Duration, kind canary.Verdict, outcome api.Outcome) api.Flush {
	culprit := api.Culprit{PID: 13626, Comm: "iptables-nft"}
	r := api.Flush{
		ID: id, Time: time.Now().Add(-ago), Kind: kind, Outcome: outcome,
		Families: []rules.Family{rules.IPv4}, Tables: []rules.TableName{rules.Nat},
		Culprit: culprit, Writers: []api.Culprit{culprit, {PID: 902, Comm: "kube-proxy"}},
		Lost:           api.Lost{Chains: 61, Rules: 174, Jumps: 8},
		NoticedSeconds: 0.00032, AbsentSeconds: 0.04786,
	}
	table := api.TableLoss{Family: rules.IPv4, Table: rules.Nat, Kind: kind, Chains: 61, Rules: 174, Jumps: 8, More: 41,
		PerChain: []api.ChainLoss{{Chain: "KUBE-SERVICES", Rules: 34}, {Chain: "PREROUTING", Rules: 3, Jumps: 3}}}
	for i := range 18 {
		table.PerChain = append(table.PerChain, api.ChainLoss{Chain: fmt.Sprintf("KUBE-SVC-%016X", 0x4E5A1B0C9D8E7F60+int64(i)*0x1357), Rules: 4})
	}
	r.Lost.Tables = []api.TableLoss{table}
	if outcome == api.Pending || outcome == reload.Skipped {
		r.AbsentSeconds = 0
	}
	return r
}

// busy returns a healthy node with a history.
func busy() api.Status {
	s := healthyNode()
	s.Flushes = []api.Flush{
		flush("660c8b90ccb7b", 2*time.Minute, canary.Emptied, reload.Proved),
		flush("660c8b8f1a2c0", 31*time.Minute, canary.TableDeleted, reload.Proved),
		flush("660c8b8e00911", 95*time.Minute, canary.Replaced, reload.Raced),
		flush("660c8b8d3e5f1", 4*time.Hour, canary.JumpsMissing, reload.Skipped),
		flush("660c8b8c9c3d2", 5*time.Hour, canary.ChainDeleted, reload.Partial),
	}
	s.Flushes[1].Families, s.Flushes[1].Tables = rules.Families(), protect.Always()
	s.Flushes[1].Culprit = api.Culprit{PID: 4711, Comm: "nft"}
	s.Flushes[1].AbsentSeconds = 0.0642
	s.Flushes[3].Culprit = api.Culprit{}
	s.Flushes[4].Policies = []string{"ipv4 filter FORWARD: DROP, was ACCEPT"}
	return s
}

// outage returns a node whose nat rules are missing.
func outage() api.Status {
	s := busy()
	s.Families[rules.IPv4][rules.Nat] = canary.Emptied
	s.Families[rules.IPv4][rules.Filter] = canary.JumpsMissing
	s.Families[rules.IPv6][rules.Nat] = canary.Unknown
	s.LossSince = time.Now().Add(-12 * time.Second)
	s.Contended = true
	s.Backend.Mixed = true
	s.Quarantined = []api.Quarantined{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-ROUTER-INPUT"}, {Family: rules.IPv4, Table: rules.Nat, Chain: "CNI-HOSTPORT-DNAT"}}
	s.Flushes = append([]api.Flush{flush("660c8b9111111", 12*time.Second, canary.Emptied, api.Pending)}, s.Flushes...)
	return s
}
