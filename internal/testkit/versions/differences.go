package versions

// What random rules leave out where the programs do other than they are asked.
var (
	// OddMasks: a mask that is no prefix is taken for the prefix of its leading bytes.
	OddMasks = Difference{UpTo: "1.8.7", Reason: "iptables-nft writes 10.0.3.0/255.0.255.0 as 10.0.0.0/8"}
	// NamedPorts: targets of nat look a port's name up for the protocol of the rule.
	NamedPorts = Difference{UpTo: "1.8.7", Reason: "DNAT and MASQUERADE refuse the port http for UDP, of which /etc/services has none"}
	// RandomRedirect: iptables-save loses an option of a target without ports.
	RandomRedirect = Difference{UpTo: "1.8.7", Reason: "REDIRECT --random is printed as REDIRECT where it has no --to-ports"}
)

// Failures are the tests that fail with some versions. A row goes with its reason: a test
// that passes against it is a failure of test/versions.
var Failures = []Failure{
	{
		Suites: []string{"bullseye"}, Test: "pkg/iptables TestKeeperLooksLike", Says: `nft does not show "flags owner"`,
		Reason: "nft 0.9.8 shows a table's flag owner without its name, which is of nft 1.0",
	},
	{
		Suites: []string{"trixie", "sid"}, Test: "pkg/iptables TestKeeperLooksLike", Says: `nft does not show "type nat hook input priority 101`,
		Reason: "nft 1.1 shows the priority of each hook by name, nft 1.0 some as numbers",
	},
	{
		Suites: []string{"trixie", "sid"}, Test: "pkg/iptables TestMirrorBesideBusyWriter", Says: "No chain/target/match by that name",
		Reason: "a defect of canaryd: since 1.8.10 iptables says so of a chain that is gone, and the read fails instead of beginning again",
	},
	{
		Suites: []string{"bullseye"}, Test: "pkg/iptables TestRestoreErrorsOfTheRealPrograms", Says: "line 3 failed, want missing_chain, line 2",
		Reason: "iptables-nft-restore 1.8.7 names the line behind the one that the kernel refuses, and not what is missing",
	},
	{
		Suites: []string{"bullseye"}, Test: "pkg/iptables TestMirrorRandomEdits", Says: "tables-nft-save: signal: aborted",
		Reason: "iptables-nft-save 1.8.7 crashes, or leaves the table out, where a base chain has another priority than iptables gives it",
	},
	{
		Suites: []string{"trixie"}, Test: "pkg/iptables TestSetsOnTheKernel", Says: "signal: segmentation fault",
		Reason: "ipset 7.22 crashes on `ipset add` with a comment, with which the test makes its sets",
	},
}
