package testkit

import (
	"runtime/debug"
	"slices"
)

// Raced reports whether the tests were built with the race detector, which costs several times as
// much as the code that it looks at: a test that counts the processor's time judges nothing then,
// and a story whose goroutines are the same on both backends runs on one. No build tag says so:
// make lint builds with all tags, and with that of the detector it would build the standard library
// a second time.
var Raced = raced()

func raced() bool {
	info, known := debug.ReadBuildInfo()
	return known && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
