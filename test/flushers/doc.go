// Package flushers runs the firewalls of a distribution, and what administrators
// run in their stead, on nodes on which the built canaryd guards the rules of
// Kubernetes, and writes down how soon they were back.
//
// They are built with the tag "flushers" only: they take minutes, and packages
// that are too many for every test run (make flushers).
package flushers
