package versions

import (
	"fmt"
	"strings"
)

// A Suite is a release of Debian's, with the versions of its programs; none are given of one that
// moves on.
type Suite struct{ Name, IPTables, NFT string }

// Suites are those on which canaryd is tried, the oldest first.
var Suites = []Suite{{"bullseye", "1.8.7", "0.9.8"}, {"bookworm", "1.8.9", "1.0.6"}, {"trixie", "1.8.11", "1.1.3"}, {Name: "sid"}}

// Programs returns what a machine of that suite names itself with: "iptables 1.8.7, nft 0.9.8".
func (s Suite) Programs() string {
	if s.IPTables == "" {
		return "iptables "
	}
	return fmt.Sprintf("iptables %s, nft %s", s.IPTables, s.NFT)
}

// A Kernel is Debian's for virtual machines: of a suite, for an architecture.
type Kernel struct {
	Suite, Arch string
	Release     string // what its release begins with; empty: it moves on
}

// Kernels are those on which canaryd is tried, the oldest first. 4.18 and 5.4 are in no suite that
// Debian's mirrors still have.
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
