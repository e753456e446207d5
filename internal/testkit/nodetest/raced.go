//go:build race

package nodetest

// raced: the tests were built with the race detector.
const raced = true
