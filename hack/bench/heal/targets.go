package main

import (
	"fmt"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// A target is a required relation between measurements of the same run.
type target struct {
	What   string  `json:"what"`
	Got    float64 `json:"got"`
	AtMost float64 `json:"atMost"`
	Holds  bool    `json:"holds"`
	// CPU is the same ratio of processor times, on which other load has less influence; 0 if
	// there is none.
	CPU float64 `json:"cpu,omitempty"`
}

func (t target) String() string {
	verdict := "holds "
	if !t.Holds {
		verdict = "MISSED"
	}
	text := fmt.Sprintf("%s  %.3g of at most %.3g: %s", verdict, t.Got, t.AtMost, t.What)
	if t.CPU > 0 {
		text += fmt.Sprintf(" (%.3g by processor time)", t.CPU)
	}
	return text
}

// linear is the allowed growth from 1,000 to 5,000 services: five times, and 1.3 because caches
// become too small.
const linear = 5 * 1.3

// targets returns the targets for which there are measurements.
func (r *report) targets() []target {
	var all []target
	add := func(what string, got, unit measure.Summary, atMost float64) {
		if got.Count == 0 || unit.Count == 0 || unit.Median == 0 {
			return
		}
		ratio := got.Median / unit.Median
		all = append(all, target{What: what, Got: ratio, AtMost: atMost, Holds: ratio <= atMost})
	}
	compare := func(what string, got, unit key, atMost float64) {
		before := len(all)
		add(what, r.of(got, seconds), r.of(unit, seconds), atMost)
		if unit := r.of(unit, cpuSeconds).Median; len(all) > before && unit > 0 {
			all[before].CPU = r.of(got, cpuSeconds).Median / unit
		}
	}
	nft, legacy := string(iptables.NFT), string(iptables.Legacy)
	one := measure.Summarize(1)
	for _, services := range []int{1000, 5000} {
		atMost := map[int]float64{1000: 0.7, 5000: 0.2}[services]
		compare(fmt.Sprintf("nft: heal at %d services, of a bare iptables-nft-restore", services),
			key{nft, services, healRun}, key{nft, services, bareRun}, atMost)
	}
	for _, services := range r.sizes {
		compare(fmt.Sprintf("legacy: heal at %d services, of a bare iptables-legacy-restore", services),
			key{legacy, services, healRun}, key{legacy, services, bareRun}, 1.5)
	}
	add("nft: flush's end to rules in force at 5000 services, of the kernel's own time for that",
		r.seconds(nft, 5000, inForceRun), r.seconds(nft, 5000, kernelRun), 1.4)
	for _, services := range r.sizes {
		compare(fmt.Sprintf("native: heal at %d services, of nft -f by hand", services),
			key{ofNative, services, healRun}, key{ofNative, services, bareRun}, 0.5)
	}
	add("native: flush's end to rules in force at 5000 services, of the kernel's own time for that",
		r.seconds(ofNative, 5000, inForceRun), r.seconds(ofNative, 5000, kernelRun), 1.2)
	add("native: capture at 5000 services after one endpoint was replaced, ms",
		times(r.seconds(ofNative, 5000, oneRead), 1000), one, 5)
	for _, b := range r.backends {
		if b == ofNative {
			continue // the kernel's own time is quadratic in the sets
		}
		compare(string(b)+": heal at 5000 services, of one at 1000", key{string(b), 5000, healRun}, key{string(b), 1000, healRun}, linear)
	}
	for _, services := range r.sizes {
		full := r.seconds(nft, services, fullRead)
		if first := r.seconds(nft, services, firstRead); first.Median < full.Median {
			full = first
		}
		add(fmt.Sprintf("nft: capture at %d services after one endpoint was replaced, of a full one (the cheaper)", services),
			r.seconds(nft, services, oneRead), full, 0.05)
	}
	add("nft: longest without a new generation at 1000 services and 20 commits a second, ms",
		times(r.seconds(nft, 1000, rushRun), 1000), one, 250)
	add("generation at 5000 services from parsed objects, ms", times(r.seconds("", 5000, generateRun), 1000), one, 35)
	for _, b := range r.backends {
		add(string(b)+": resident memory of canaryd at rest at 5000 services, MiB",
			r.of(key{string(b), 5000, restingRun}, func(u measure.Use) float64 { return u.MiB }), one, 60)
		add(string(b)+": its peak while it heals, MiB",
			r.of(key{string(b), 5000, healRun}, func(u measure.Use) float64 { return u.MiB }), one, 60)
	}
	return all
}

func times(s measure.Summary, n float64) measure.Summary {
	return measure.Summary{Median: s.Median * n, Least: s.Least * n, Most: s.Most * n, Count: s.Count}
}

func seconds(u measure.Use) float64 { return u.Seconds }

func cpuSeconds(u measure.Use) float64 { return u.UserSeconds + u.SystemSeconds }
