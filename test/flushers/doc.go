// Package flushers runs a distribution's firewalls, and administrators' own scripts, on nodes
// on which the built canaryd guards Kubernetes' rules. It records how soon the rules are back.
// The distribution's programs that write rules for good, and flannel, run as owners: their
// rules come back.
//
// Tests need programs that hack/install-deps.sh unpacks or hack/owners.sh builds. Without its
// program a test is skipped, and with CI=true it fails.
package flushers
