package web

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/sample"
)

// TestOwnNames lists the Host headers that canaryd answers at each address. A web site's own
// name is never among them.
func TestOwnNames(t *testing.T) {
	loopback := []string{"", "127.0.0.1", "127.0.0.1:9475", "localhost", "LOCALHOST.:9475", "[::1]:9475", "[::1]", "127.0.0.1:1234", "[::ffff:127.0.0.1]"}
	never := []string{"evil.example", "evil.example:9475", "localhost.evil.example", "127.0.0.1.evil.example", "evil.localhost", "2130706433", "127.1", "0x7f000001", "a:b:c", "[evil.example]"}
	for _, c := range []struct {
		name, bind, listening string
		further               []string
		answered, refused     []string
	}{
		{"the loopback", "127.0.0.1:9475", "127.0.0.1:9475", nil, nil, []string{"192.0.2.1", "0.0.0.0", "node-1"}},
		{"the loopback by its name", "localhost:9475", "[::1]:9475", nil, nil, []string{"192.0.2.1", "node-1"}},
		{"one address", "192.0.2.1:9475", "192.0.2.1:9475", nil, []string{"192.0.2.1:9475", "[::ffff:192.0.2.1]:9475"}, []string{"192.0.2.2:9475", "node-1"}},
		{"as the DaemonSet writes it", "[192.0.2.1]:9475", "192.0.2.1:9475", nil, []string{"192.0.2.1:9475"}, []string{"192.0.2.2:9475"}},
		{"one of IPv6", "[2001:db8::1]:9475", "[2001:db8::1]:9475", nil, []string{"[2001:DB8:0::1]:9475"}, []string{"[2001:db8::2]:9475"}},
		{"one of a link", "[fe80::1%eth0]:9475", "[fe80::1%eth0]:9475", nil, []string{"[fe80::1]:9475"}, []string{"[fe80::2]:9475"}},
		{"a name", "node-1.example:9475", "192.0.2.1:9475", nil, []string{"Node-1.example:9475", "node-1.example.", "192.0.2.1"}, []string{"node-1", "192.0.2.2"}},
		{"every address", ":9475", "[::]:9475", nil, []string{"192.0.2.1:9475", "[2001:db8::1]:9475"}, []string{"node-1"}},
		{"every address of IPv4", "0.0.0.0:9475", "0.0.0.0:9475", nil, []string{"192.0.2.1:9475"}, []string{"node-1"}},
		{"further names", "192.0.2.1:9475", "192.0.2.1:9475", []string{"node-1", "192.0.2.2"}, []string{"NODE-1:9475", "192.0.2.2:80"}, []string{"node-2", "192.0.2.3"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			listening, err := net.ResolveTCPAddr("tcp", c.listening)
			if err != nil {
				t.Fatal(err)
			}
			own := newOwnNames(c.bind, listening, c.further)
			want, got := map[string]bool{}, map[string]bool{}
			for _, host := range append(c.answered, loopback...) {
				want[host], got[host] = true, own.has(host)
			}
			for _, host := range append(c.refused, never...) {
				want[host], got[host] = false, own.has(host)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("answered (-want +got):\n%s", diff)
			}
		})
	}
}

// TestMisdirectedRequests: the server refuses a stranger's name with a remedy, even if the name
// is in the request line, and shows it nothing.
func TestMisdirectedRequests(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	healthy := sample.Status()
	healthy.RulesWithoutOwner = nil
	s := Listening{
		Address: l.Addr().String(), Handler: face(healthy, nil), Names: []string{"node-1"}, Report: func(error) {},
		listen: func(string) (net.Listener, error) { return l, nil },
	}
	go func() { served <- s.Run(ctx) }()
	const refused = `canaryd does not answer under the name "evil.example:9475". Ask for its address, or for localhost on the node, or name it to canaryd: --metrics-host=NAME` + "\n"
	for request, want := range map[string]string{
		"GET /readyz HTTP/1.1\r\nHost: evil.example:9475\r\n\r\n":                 "421 " + refused,
		"GET /nothing HTTP/1.1\r\nHost: evil.example:9475\r\n\r\n":                "421 " + refused,
		"POST /readyz HTTP/1.1\r\nHost: evil.example:9475\r\n\r\n":                "421 " + refused,
		"GET http://evil.example:9475/readyz HTTP/1.1\r\nHost: localhost\r\n\r\n": "421 " + refused,
		"GET /readyz HTTP/1.1\r\nHost: localhost:8080\r\n\r\n":                    "200 ok\n",
		"GET /readyz HTTP/1.1\r\nHost: node-1\r\n\r\n":                            "200 ok\n",
		"GET /readyz HTTP/1.0\r\n\r\n":                                            "200 ok\n",
	} {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		conn.Close()
		line, _, _ := strings.Cut(request, "\r\n\r\n")
		if got := fmt.Sprintf("%d %s", response.StatusCode, body); got != want || err != nil {
			t.Errorf("%q: got %q, %v; want %q", line, got, err, want)
		}
		if got := response.Header.Get("X-Content-Type-Options"); got != "nosniff" {
			t.Errorf("%q: X-Content-Type-Options is %q", line, got)
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
