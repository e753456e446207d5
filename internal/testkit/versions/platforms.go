package versions

import (
	"fmt"
	"strings"
)

// A Suite is a release of Debian, with the versions of its programs. They are empty for a
// release that still changes.
type Suite struct{ Name, IPTables, NFT string }

// Suites are the releases on which canaryd is tried, the oldest first.
var Suites = []Suite{{"bullseye", "1.8.7", "0.9.8"}, {"bookworm", "1.8.9", "1.0.6"}, {"trixie", "1.8.11", "1.1.3"}, {Name: "sid"}}

// Programs returns the name that a machine of that suite reports: "iptables 1.8.7, nft 0.9.8".
func (s Suite) Programs() string {
	if s.IPTables == "" {
		return "iptables "
	}
	return fmt.Sprintf("iptables %s, nft %s", s.IPTables, s.NFT)
}

// A Kernel is Debian's kernel for virtual machines: of a suite, for an architecture.
type Kernel struct {
	Suite, Arch string
	Release     string // the beginning of its release; empty: it still changes
}

// Kernels are the kernels on which canaryd is tried, the oldest first. No suite on Debian's
// mirrors has 4.18 or 5.4 any more.
var Kernels = []Kernel{
	{"bullseye", "amd64", "5.10."}, {"bookworm", "amd64", "6.1."}, {"trixie", "amd64", "6.12."}, {"sid", "amd64", ""},
	{"trixie", "arm64", "6.12."},
}

// String returns the kernel's name in KERNELS of make kernels.
func (k Kernel) String() string { return k.Suite + "-" + k.Arch }

// Rows returns the rows of docs/measured.md's table of trials on other kernels and with other
// programs, as "what | command".
func Rows() []string {
	var rows []string
	for _, k := range Kernels {
		release := "the newest"
		if k.Release != "" {
			release = strings.TrimSuffix(k.Release, ".")
		}
		rows = append(rows, fmt.Sprintf("| Linux %s, %s, with programs of %s | `make kernels KERNELS=%s` |", release, k.Arch, k.Suite, k))
	}
	for _, s := range Suites {
		programs := "the newest iptables and nft"
		if s.IPTables != "" {
			programs = s.Programs()
		}
		rows = append(rows, fmt.Sprintf("| %s, of Debian %s | `make versions` |", programs, s.Name))
	}
	return rows
}
