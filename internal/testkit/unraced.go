//go:build !race

package testkit

// Raced reports whether the tests were built with the race detector.
const Raced = false
