//go:build race

package testkit

// Raced reports whether the tests were built with the race detector, which costs several times as
// much as the code that it looks at: a test that counts the processor's time judges nothing then,
// and a story whose goroutines are the same on both backends runs on one.
const Raced = true
