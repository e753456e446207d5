package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestPicture: the picture in the documents is the recording's.
func TestPicture(t *testing.T) {
	text, err := os.ReadFile("recording.json")
	if err != nil {
		t.Fatal(err)
	}
	var r recording
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("../../docs/images/flush.svg")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(r.draw())); diff != "" {
		t.Errorf("docs/images/flush.svg is not drawn from the recording; go run ./hack/picture (-want +got):\n%s", diff)
	}
	var outages, back int
	for _, a := range r.Attempts {
		switch {
		case a.At < 0 && !a.OK:
			t.Errorf("a connection to %s failed before the flush", r.Targets[a.Target])
		case !a.OK:
			outages++
		case outages > 0:
			back++
		}
	}
	if outages == 0 || back == 0 {
		t.Errorf("the recording has %d failed connections, and %d answered ones after the first of these", outages, back)
	}
}

// TestEvents: the picture names the events in canaryd's log, and a program's name cannot break
// it.
func TestEvents(t *testing.T) {
	log := `I1122 10:00:00.010000       1 decision.go:1] "Rules are being flushed" flush="1" tables="ipv4 nat emptied" noticedAfter="510µs" next="replaying"
I1122 10:00:00.080000       1 record.go:1] "Rules were lost" flush="1" rules=940 chains=351 jumps=17 by="pid 7 (<nft> flush ruleset) <- bash"
I1122 10:00:00.081000       1 record.go:1] "The rules are back and proved" flush="1" outcome="proved" absent="68.18ms" attempts=1
I1122 10:00:00.090000       1 daemon.go:1] "Something else"
`
	r := recording{Command: "nft flush ruleset", Log: logLines(log, time.Date(2026, 11, 22, 10, 0, 0, 0, time.Local)), Targets: []string{"a"}}
	want := []event{
		{0, "$ nft flush ruleset", ""},
		{10, "Rules are being flushed", "noticed after 510µs"},
		{80, "Rules were lost", "940 rules in 351 chains, by pid 7 (<nft> flush ruleset)"},
		{81, "The rules are back and proved", "absent for 68.18ms"},
	}
	if diff := cmp.Diff(want, r.events(), cmp.AllowUnexported(event{})); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if picture := string(r.draw()); strings.Contains(picture, "<nft>") {
		t.Error("a program's name is written as an element of the picture")
	}
}
