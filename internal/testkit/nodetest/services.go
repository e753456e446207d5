package nodetest

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
)

// Services returns what kube-proxy wrote to IPv4's nat and filter for 100, 1,000 or 5,000
// services, as input of iptables-restore --noflush. It reads the data of the measurements, by a
// path from a package in test.
func (n *Node) Services(count int) string {
	n.Helper()
	file, err := os.Open(fmt.Sprintf("../../hack/bench/heal/testdata/services-%d.rules.gz", count))
	n.Must(err)
	defer file.Close()
	text, err := gzip.NewReader(file)
	n.Must(err)
	all, err := io.ReadAll(text)
	n.Must(err)
	return string(all)
}
