//go:build race

package testkit

// Raced reports whether the tests were built with the race detector, which costs several times as
// much as what it looks at: a test that counts the processor's time judges nothing then.
const Raced = true
