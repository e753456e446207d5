package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestForeignHostNames: a web site whose name leads to canaryd's address (DNS rebinding) reads
// nothing through a browser on the node. Prometheus by an address, a tunnel and names that the
// operator gave are answered.
func TestForeignHostNames(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		for _, c := range []struct {
			flags, answered, refused []string
		}{
			{nil, []string{"127.0.0.1:9475", "localhost:8080", "[::1]:9475"}, []string{"evil.example:9475", "node-1:9475", "192.0.2.1:9475"}},
			{[]string{"--metrics-bind-address=:9475", "--metrics-host=node-1"}, []string{"127.0.0.1:9475", "node-1:9475", "192.0.2.1:9475", "[2001:db8::1]:9475"}, []string{"evil.example:9475", "node-2:9475"}},
		} {
			d := n.Start(c.flags...)
			for _, path := range []string{"/", "/metrics", "/healthz", "/readyz", "/api/v1/status"} {
				for _, host := range c.answered {
					if code, body := askAs(n, host, path); code != http.StatusOK {
						n.Errorf("%q: GET %s for %s: %d %s", c.flags, path, host, code, body)
					}
				}
				for _, host := range c.refused {
					code, body := askAs(n, host, path)
					want := fmt.Sprintf("canaryd does not answer under the name %q.", host)
					if code != http.StatusMisdirectedRequest || !strings.HasPrefix(body, want) || !strings.Contains(body, "--metrics-host=NAME") {
						n.Errorf("%q: GET %s for %s: %d %s", c.flags, path, host, code, body)
					}
				}
			}
			d.Stop()
		}
	})
}

// askAs asks canaryd's port as one who knows it under another name.
func askAs(n *nodetest.Node, host, path string) (code int, body string) {
	n.Helper()
	conn, err := net.Dial("tcp", tcp)
	n.Must(err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET "+path+" HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
	n.Must(err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	n.Must(err)
	text, err := io.ReadAll(response.Body)
	n.Must(err)
	return response.StatusCode, string(text)
}
