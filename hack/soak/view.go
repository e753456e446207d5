package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// patient is the longest time of a patient connection: TCP sends its SYN at least four
	// times.
	patient = 15 * time.Second
	// impatient is the longest time of an impatient connection.
	impatient = 20 * time.Millisecond
)

// A viewLoad is the load of one client of the view, which has the ways of one place.
type viewLoad struct {
	Ways []way
	Each int // established connections of each way
	// The times between two requests of a flow, two patient connections of a way, and two
	// impatient ones.
	Ping, Patient, Impatient time.Duration
}

// A wayView has the results of one way's connections for one flush.
type wayView struct {
	Way       string
	Flows     []flowView
	Patient   []attempt
	Impatient []attempt // none over UDP
}

// The orders to the client, one on each line. It answers near and away with a line of JSON.
const (
	near   = "near"   // a flush is near: open lost flows again, and send requests often
	enough = "enough" // begin no more patient connections
	cut    = "cut"    // the test repairs the rules: later stalls do not belong to the flush
	away   = "away"   // begin no more connections, wait for all, and report
)

// A viewReply is the client's answer.
type viewReply struct {
	Error string
	Views []wayView // to "away"
}

// A viewer is a client of the view.
type viewer struct {
	viewLoad
	pace    pace
	flows   [][]*flow // of each way
	mu      sync.Mutex
	views   []wayView
	asking  sync.WaitGroup
	patient chan struct{} // closed at "enough"
	all     chan struct{} // closed at "away"
}

// runViewer follows orders until its input ends.
func runViewer(text string, stdin io.Reader, stdout io.Writer) error {
	v := &viewer{pace: pace{wait: idlePing}}
	if err := json.Unmarshal([]byte(text), &v.viewLoad); err != nil {
		return fmt.Errorf("the load of the view: %w", err)
	}
	v.flows = make([][]*flow, len(v.Ways))
	reply := json.NewEncoder(stdout)
	for scan := bufio.NewScanner(stdin); scan.Scan(); {
		var err error
		switch scan.Text() {
		case near:
			var r viewReply
			if err := v.near(); err != nil {
				r.Error = err.Error()
			}
			err = reply.Encode(r)
		case enough:
			close(v.patient)
		case cut:
			v.cut()
		case away:
			err = reply.Encode(viewReply{Views: v.away()})
		default:
			err = fmt.Errorf("the client of the view does not know %q", scan.Text())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// near opens missing flows, and makes all flows send requests often.
func (v *viewer) near() error {
	for i, w := range v.Ways {
		for n := range v.Each {
			if n == len(v.flows[i]) {
				v.flows[i] = append(v.flows[i], nil)
			} else if !v.flows[i][n].isLost() {
				continue
			} else {
				v.flows[i][n].close()
			}
			f, err := openFlow(w, w.Targets[n%len(w.Targets)], &v.pace)
			if err != nil {
				return err
			}
			v.flows[i][n] = f
		}
	}
	v.pace.set(v.Ping)
	time.Sleep(2 * idlePing) // each flow has ended its long rest by then
	v.patient, v.all = make(chan struct{}), make(chan struct{})
	v.views = make([]wayView, len(v.Ways))
	for i, w := range v.Ways {
		for _, f := range v.flows[i] {
			f.begin()
		}
		v.views[i].Way = w.String()
		v.every(v.patient, v.Patient, i, patient, func(view *wayView, a attempt) { view.Patient = append(view.Patient, a) })
		if w.Network == "tcp4" {
			v.every(v.all, v.Impatient, i, impatient, func(view *wayView, a attempt) { view.Impatient = append(view.Impatient, a) })
		}
	}
	return nil
}

// every begins connections of a way, one after each wait, until the channel is closed.
func (v *viewer) every(until chan struct{}, wait time.Duration, i int, limit time.Duration, keep func(*wayView, attempt)) {
	w := v.Ways[i]
	v.asking.Go(func() {
		time.Sleep(wait * time.Duration(i) / time.Duration(len(v.Ways))) // not all at once
		tick := time.NewTicker(wait)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-until:
				return
			case <-tick.C:
			}
			v.asking.Go(func() {
				a := w.try(w.Targets[n%len(w.Targets)], limit)
				v.mu.Lock()
				defer v.mu.Unlock()
				keep(&v.views[i], a)
			})
		}
	})
}

// cut records the results of the flows so far.
func (v *viewer) cut() {
	for i, flows := range v.flows {
		for _, f := range flows {
			v.views[i].Flows = append(v.views[i].Flows, f.now())
		}
	}
}

// away waits for the end of each connection and for an answer of each flow.
func (v *viewer) away() []wayView {
	close(v.all)
	now := clock()
	v.asking.Wait()
	for i, flows := range v.flows {
		for n, f := range flows {
			seen := f.after(now)
			if n == len(v.views[i].Flows) {
				v.views[i].Flows = append(v.views[i].Flows, seen)
			}
		}
	}
	v.pace.set(idlePing)
	return v.views
}
