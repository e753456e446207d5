package testkit

import (
	"runtime/debug"
	"slices"
)

// Raced reports whether the tests were built with the race detector, which takes several times
// as long as the code itself. A test that counts the processor's time judges nothing then, and
// a test whose goroutines are the same on both backends runs on one. It uses no build tag: make
// lint builds with all tags, and with the detector's tag it would build the standard library a
// second time.
var Raced = raced()

func raced() bool {
	info, known := debug.ReadBuildInfo()
	return known && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
