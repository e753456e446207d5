package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

//go:embed testdata/*.gz
var testdata embed.FS

// sizes returns the numbers of services for which testdata has files.
func sizes() []int { return []int{100, 1000, 5000} }

// data returns a file of testdata, for that many services.
func data(services int, kind string) ([]byte, error) {
	packed, err := testdata.ReadFile(fmt.Sprintf("testdata/services-%d.%s.gz", services, kind))
	if err != nil {
		return nil, err
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
}

// options returns the options of the recorded kube-proxy.
func options(services int) kube.Options {
	o := kube.DefaultOptions()
	o.Families = []rules.Family{rules.IPv4}
	o.HostnameOverride = "node-a"
	o.NodeIPs = []netip.Addr{netip.MustParseAddr("192.168.0.2")}
	o.ClusterCIDRs = []string{"10.0.0.0/8"}
	o.RandomFully = true
	switch services {
	case 100:
		o.MasqueradeAll, o.RandomFully, o.NodePortAddresses = true, false, []string{"127.0.0.0/8"}
	case 5000:
		o.ClusterCIDRs = nil
	}
	return o
}

// A payload is an owner's text for the tables, as files for iptables-restore.
type payload struct {
	// full is kube-proxy's own text, unchanged.
	full string
	// empty makes the tables like those of a new node.
	empty string
	// rewrite is a full sync after full: the same chains, without jumps. It is not measured, so
	// it declares chains in the fastest order for iptables-nft-restore.
	rewrite string
	// one replaces the chain of one endpoint.
	one   string
	chain string // the text of one, see oneChain
	rules int    // the number of rules in full
}

// toPort returns a text that replaces the chain of one endpoint, with another port.
func (p payload) toPort(port int) string {
	return strings.ReplaceAll(p.chain, "PORT", strconv.Itoa(port))
}

// write writes the payload's files into a folder.
func (p payload) write(dir string, services int) (payload, error) {
	text, err := data(services, "rules")
	if err != nil {
		return p, err
	}
	if p.chain, err = oneChain(text); err != nil {
		return p, err
	}
	p.rules = bytes.Count(text, []byte("\n-A "))
	write := func(name, text string) string {
		path := dir + "/" + name
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		return path
	}
	p.full = write("full", string(text))
	p.empty = write("empty", "*mangle\nCOMMIT\n*nat\nCOMMIT\n*filter\nCOMMIT\n")
	p.rewrite = write("rewrite", rewrite(text))
	p.one = write("one", p.toPort(9999))
	return p, err
}

// oneChain returns input of iptables-restore that replaces the first endpoint's chain, with PORT
// in place of the endpoint's port.
func oneChain(text []byte) (string, error) {
	var chain string
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != "-A" || !strings.HasPrefix(words[1], "KUBE-SEP-") || chain != "" && words[1] != chain {
			continue
		}
		if chain == "" {
			chain = words[1]
			fmt.Fprintf(&b, "*nat\n:%s - [0:0]\n", chain)
		}
		if i := slices.Index(words, "--to-destination"); i > 0 {
			address, _, _ := strings.Cut(words[i+1], ":")
			line = strings.Replace(line, words[i+1], address+":PORT", 1)
		}
		b.WriteString(line + "\n")
	}
	if chain == "" {
		return "", fmt.Errorf("the rules hold no chain of an endpoint")
	}
	return b.String() + "COMMIT\n", nil
}

// rewrite returns text without jumps, and with its chains declared in descending order.
func rewrite(text []byte) string {
	var b strings.Builder
	var declared []string
	scan := bufio.NewScanner(bytes.NewReader(text))
	for scan.Scan() {
		line := scan.Text()
		switch {
		case strings.HasPrefix(line, ":"):
			if strings.HasPrefix(line, ":KUBE-") {
				declared = append(declared, line)
			}
			continue
		case strings.HasPrefix(line, "-A ") && !strings.HasPrefix(line, "-A KUBE-"):
			continue
		}
		slices.Sort(declared)
		slices.Reverse(declared)
		for _, d := range declared {
			b.WriteString(d + "\n")
		}
		declared = nil
		b.WriteString(line + "\n")
	}
	return b.String()
}
