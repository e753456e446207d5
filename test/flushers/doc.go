// Package flushers runs the firewalls of a distribution, and what administrators
// run in their stead, on nodes on which the built canaryd guards the rules of
// Kubernetes, and writes down how soon they were back.
//
// What hack/install-deps.sh could not unpack on the machine at hand is skipped, which
// with CI=true is a failure.
package flushers
