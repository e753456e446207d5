package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// The oldest kernel on which canaryd was tried; see docs/measured.md.
const oldestMajor, oldestMinor = 4, 18

// kernelRelease returns the output of uname -r, for the warnings of detect.
func kernelRelease() (string, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", fmt.Errorf("asking for the kernel's release: %w", err)
	}
	return unix.ByteSliceToString(name.Release[:]), nil
}

// platformWarnings returns a line for each doubt about a kernel of that release with that
// evidence. canaryd is known not to work there, or was never tried.
func platformWarnings(release string, e iptables.Evidence) []string {
	var lines []string
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		lines = append(lines, fmt.Sprintf("the kernel calls itself %q, which is no release of Linux that canaryd was tried on", release))
	} else if major < oldestMajor || major == oldestMajor && minor < oldestMinor {
		lines = append(lines, fmt.Sprintf("Linux %s is older than any that canaryd was tried on (%d.%d)", release, oldestMajor, oldestMinor))
	}
	for _, counts := range e.Counts {
		if _, there := counts[e.Backend]; there {
			return lines
		}
	}
	if e.Backend == iptables.Legacy {
		return append(lines, "this kernel has no legacy iptables, or its modules are not loaded: canaryd would have nothing to guard")
	}
	return append(lines, "this kernel has no nf_tables: canaryd would have nothing to guard")
}
