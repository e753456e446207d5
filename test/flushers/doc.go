// Package flushers runs the firewalls of a distribution, and what administrators
// run in their stead, on nodes on which the built canaryd guards the rules of
// Kubernetes, and writes down how soon they were back. Programs of the distribution that write
// rules for good, and flannel, run there as owners: their rules come back.
//
// Tests of a program that hack/install-deps.sh could not unpack on the machine at hand, or that
// hack/owners.sh could not build, are skipped, which with CI=true is a failure.
package flushers
