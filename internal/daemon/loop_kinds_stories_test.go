package daemon

import (
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/watch"
)

// kindStories are stories about a loss, for each kind of table.
var kindStories = []struct {
	name  string
	setup setup
	story func(n *kindNode)
}{
	{"a flush", setup{}, func(n *kindNode) { n.flush(); n.settled() }},
	{"its messages are missed", setup{}, func(n *kindNode) { n.missed(); n.settled() }},
	{"the owner is faster", setup{}, func(n *kindNode) {
		n.flush()
		time.Sleep(5 * time.Millisecond)
		n.owner()
		n.settled()
	}},
	{"twice", setup{}, func(n *kindNode) { n.flush(); n.settled(); n.flush(); n.settled() }},
	{"again within the wait", setup{}, func(n *kindNode) {
		n.flush()
		time.Sleep(5 * time.Millisecond)
		n.flush()
		n.settled()
	}},
	{"in a pause", setup{}, func(n *kindNode) {
		n.pause(time.Minute)
		n.flush()
		n.after(10 * time.Second)
	}},
	{"in a pause, which ends", setup{}, func(n *kindNode) {
		n.pause(time.Minute)
		n.flush()
		n.after(2 * time.Minute)
	}},
	{"in a pause, and its owner is back before the end", setup{}, func(n *kindNode) {
		n.pause(time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.owner()
		n.after(2 * time.Minute)
	}},
	{"in a pause, its owner is back, and a flush follows", setup{}, func(n *kindNode) {
		n.pause(time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.owner()
		n.after(10 * time.Second)
		n.flush()
		n.after(2 * time.Minute)
	}},
	{"observed", setup{mode: api.Observe}, func(n *kindNode) { n.flush(); n.after(10 * time.Second) }},
	{"observed, and its owner writes", setup{mode: api.Observe}, func(n *kindNode) {
		n.flush()
		n.after(10 * time.Second)
		n.owner()
		n.after(10 * time.Second)
	}},
	{"observed, twice", setup{mode: api.Observe}, func(n *kindNode) {
		n.flush()
		n.after(10 * time.Second)
		n.owner()
		n.after(10 * time.Second)
		n.flush()
		n.after(10 * time.Second)
	}},
	{"refused", setup{}, func(n *kindNode) { n.refuse(true); n.flush(); n.after(10 * time.Second) }},
	{"refused for a time", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		n.refuse(false)
		n.after(2 * pace.LastTry)
	}},
	{"refused, and its owner writes", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		n.owner()
		n.refuse(false)
		n.after(2 * pace.LastTry)
	}},
	{"refused over a restart", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		n.restart(10*time.Second, api.Heal)
		n.refuse(false)
		n.after(2 * pace.LastTry)
	}},
	{"while no canaryd runs", setup{}, func(n *kindNode) {
		n.stop()
		n.missed()
		n.restart(10*time.Second, api.Heal)
		n.after(2 * pace.LastTry)
	}},
	{"while no canaryd runs, for long", setup{}, func(n *kindNode) {
		n.stop()
		n.missed()
		n.restart(time.Hour, api.Heal)
		n.after(2 * pace.LastTry)
	}},
	{"without end", setup{}, func(n *kindNode) {
		for range 200 {
			n.flush()
			n.after(50 * time.Millisecond)
		}
		n.after(time.Minute)
	}},
	{"every two seconds", setup{}, func(n *kindNode) {
		for range 20 {
			n.flush()
			n.after(2 * time.Second)
		}
		n.after(time.Minute)
	}},
	{"restored on request in a pause", setup{}, func(n *kindNode) {
		n.pause(10 * time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.restore(api.RestoreRequest{})
		n.after(10 * time.Second)
	}},
	{"restored on request while observed", setup{mode: api.Observe}, func(n *kindNode) {
		n.flush()
		n.after(10 * time.Second)
		n.restore(api.RestoreRequest{})
		n.after(10 * time.Second)
	}},
	{"a decision, dismissed", setup{}, func(n *kindNode) {
		n.lostForAnHour()
		must(n.t, errorOf(n.d.Dismiss(n.t.Context())))
		n.after(10 * time.Second)
	}},
	{"a decision, restored on request", setup{}, func(n *kindNode) {
		n.lostForAnHour()
		n.restore(api.RestoreRequest{})
		n.after(10 * time.Second)
	}},
	{"a decision, and the owner writes", setup{}, func(n *kindNode) {
		n.lostForAnHour()
		n.owner()
		n.after(10 * time.Second)
	}},
	{"a restart in a pause", setup{}, func(n *kindNode) {
		n.pause(10 * time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.restart(10*time.Second, api.Heal)
		n.after(10 * time.Second)
		n.resume()
		n.after(2 * pace.LastTry)
	}},
	{"a flush in a pause, and canaryd is down", setup{}, func(n *kindNode) {
		n.pause(10 * time.Minute)
		n.stop()
		n.missed()
		n.restart(10*time.Second, api.Heal)
		n.after(10 * time.Second)
		n.resume()
		n.after(2 * pace.LastTry)
	}},
	{"observed, and healed by the next run", setup{mode: api.Observe}, func(n *kindNode) {
		n.flush()
		n.after(10 * time.Second)
		n.restart(10*time.Second, api.Heal)
		n.after(2 * pace.LastTry)
	}},
	{"missed while observed, and its owner writes", setup{mode: api.Observe}, func(n *kindNode) {
		n.missed()
		n.after(10 * time.Second)
		n.owner()
		n.after(10 * time.Second)
	}},
	{"paused while it is refused", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		n.pause(time.Minute)
		n.refuse(false)
		n.after(2 * time.Minute)
	}},
	{"cleaned up while it is refused", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		n.refuse(false)
		must(n.t, n.d.Cleanup(n.t.Context(), api.CleanupRequest{}))
		n.after(10 * time.Second)
	}},
	{"stopped while it is refused", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		n.restart(time.Hour, api.Heal)
		n.refuse(false)
		n.after(2 * pace.LastTry)
	}},
	{"nothing can be read for a time", setup{}, func(n *kindNode) {
		n.blind(true)
		n.flush()
		n.after(10 * time.Second)
		n.blind(false)
		n.after(2 * pace.LastTry)
	}},
	{"nothing can be read, and nothing is lost", setup{}, func(n *kindNode) {
		n.blind(true)
		n.hints.Give(watch.SourceNFT)
		n.after(10 * time.Second)
		n.blind(false)
		n.after(10 * time.Second)
	}},
	{"nothing can be read, and the owner is faster", setup{}, func(n *kindNode) {
		n.blind(true)
		n.flush()
		n.after(10 * time.Second)
		n.owner()
		n.after(time.Second)
		n.blind(false)
		n.after(2 * pace.LastTry)
	}},
	{"again right after the replay", setup{}, func(n *kindNode) {
		n.flush()
		time.Sleep(21 * time.Millisecond)
		n.flush()
		n.settled()
	}},
	{"stopped within the wait", setup{}, func(n *kindNode) {
		n.flush()
		time.Sleep(5 * time.Millisecond)
		n.restart(10*time.Second, api.Heal)
		n.after(2 * pace.LastTry)
	}},
	{"paused within the wait", setup{}, func(n *kindNode) {
		n.flush()
		time.Sleep(5 * time.Millisecond)
		n.pause(time.Minute)
		n.after(2 * time.Minute)
	}},
	{"twice in a pause", setup{}, func(n *kindNode) {
		n.pause(time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.flush()
		n.after(2 * time.Minute)
	}},
	{"a pause that is extended", setup{}, func(n *kindNode) {
		n.pause(time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.pause(2 * time.Minute)
		n.after(5 * time.Minute)
	}},
	{"a pause over a restart, whose owner writes while canaryd is down", setup{}, func(n *kindNode) {
		n.pause(10 * time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.stop()
		n.owner()
		n.restart(10*time.Second, api.Heal)
		n.after(10 * time.Second)
		n.resume()
		n.after(2 * pace.LastTry)
	}},
	{"observed, and the next run observes, too", setup{mode: api.Observe}, func(n *kindNode) {
		n.flush()
		n.after(10 * time.Second)
		n.restart(10*time.Second, api.Observe)
		n.after(10 * time.Second)
		n.owner()
		n.after(10 * time.Second)
	}},
	{"the owner changes rules, and a flush follows", setup{}, func(n *kindNode) {
		n.change()
		n.after(10 * time.Second)
		n.flush()
		n.settled()
	}},
	{"dismissed while it is refused", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		must(n.t, errorOf(n.d.Dismiss(n.t.Context())))
		n.refuse(false)
		n.after(2 * pace.LastTry)
	}},
	{"restored on request while it is refused", setup{}, func(n *kindNode) {
		n.refuse(true)
		n.flush()
		n.after(10 * time.Second)
		n.refuse(false)
		n.restore(api.RestoreRequest{})
		n.after(10 * time.Second)
	}},
	{"restored on request, and refused", setup{}, func(n *kindNode) {
		n.pause(10 * time.Minute)
		n.flush()
		n.after(10 * time.Second)
		n.refuse(true)
		n.restore(api.RestoreRequest{})
		n.after(10 * time.Second)
	}},
}
