package versions

// Random rules avoid these cases, in which the programs do not follow their input.
var (
	// OddMasks: a mask that is no prefix is read as the prefix of its leading bytes.
	OddMasks = Difference{UpTo: "1.8.7", Reason: "iptables-nft writes 10.0.3.0/255.0.255.0 as 10.0.0.0/8"}
	// NamedPorts: targets of nat look up a port's name for the protocol of the rule.
	NamedPorts = Difference{UpTo: "1.8.7", Reason: "DNAT and MASQUERADE refuse the port http for UDP, of which /etc/services has none"}
	// RandomRedirect: iptables-save loses an option of a target without ports.
	RandomRedirect = Difference{UpTo: "1.8.7", Reason: "REDIRECT --random is printed as REDIRECT where it has no --to-ports"}
	// NamelessOwner: nft does not know the name of a table's flag.
	NamelessOwner = Difference{UpTo: "1.8.7", Reason: "nft 0.9.8, which goes with it, shows the flag owner as nothing"}
	// ChainUnnamed: iptables-nft-restore misreports a rule of a missing chain.
	ChainUnnamed = Difference{UpTo: "1.8.7", Reason: "it does not say that a chain is missing"}
)

// Failures are the tests that fail with some versions. A row must be removed with its reason:
// if its test passes, test/versions fails.
var Failures = []Failure{
	{
		Suites: []string{"bullseye"}, Test: "pkg/iptables TestMirrorRandomEdits", Says: "tables-nft-save : signal: aborted",
		Reason: "iptables-nft-save 1.8.7 crashes, or leaves the table out, where a base chain has another priority than iptables gives it",
	},
}
