package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestIdleConnectionsKeepNoProbeWaiting: 900 connections that say nothing, and as many that
// say half a request, are open. A probe is answered all the same, and so is a request that was
// being answered before they came.
func TestIdleConnectionsKeepNoProbeWaiting(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	began, finish := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { writeCheck(w, nil, "ok") })
	mux.HandleFunc("/slow", func(w http.ResponseWriter, _ *http.Request) {
		close(began)
		<-finish
		writeCheck(w, nil, "ok")
	})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- ServeHTTP(ctx, l, mux) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	get := func(path string) error {
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
		response, err := client.Get("http://" + l.Addr().String() + path)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if body, err := io.ReadAll(response.Body); err != nil || string(body) != "ok\n" {
			return fmt.Errorf("%q, %w", body, err)
		}
		return nil
	}
	slow := make(chan error, 1)
	go func() { slow <- get("/slow") }()
	<-began
	for _, text := range []string{"", "GET /healthz HTTP/1.1\r\nHost: a"} {
		var idle []net.Conn
		for range 900 {
			conn, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			idle = append(idle, conn)
			_, _ = io.WriteString(conn, text) // it may be closed by now
		}
		for range 3 {
			if err := get("/healthz"); err != nil {
				t.Errorf("beside idle connections: %v", err)
			}
		}
		for _, conn := range idle {
			conn.Close()
		}
	}
	close(finish)
	if err := <-slow; err != nil {
		t.Errorf("the request that was being answered: %v", err)
	}
}

// TestACrowdThatTalks: where every connection is answered, the next one waits for an end of one.
func TestACrowdThatTalks(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := newCrowd(l, 2)
	accepted := make(chan net.Conn)
	var accepting sync.WaitGroup
	accepting.Go(func() {
		defer close(accepted)
		for {
			conn, err := c.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	})
	var first net.Conn
	for i := range 4 {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		switch i {
		case 0:
			first = <-accepted
			c.follow(first, http.StateActive)
		case 1:
			c.follow(<-accepted, http.StateActive)
		}
	}
	select {
	case <-accepted:
		t.Error("a third connection did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	first.Close()
	third := <-accepted
	c.follow(third, http.StateActive)
	c.Close()
	for range accepted { // the fourth may have been accepted before the end
	}
	accepting.Wait()
}

// TestASquatterOnThePort: another process has the port. canaryd tries again, says so once and in
// the status, and serves as soon as it is free.
func TestASquatterOnThePort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports []string
		tries := 0
		s := Listening{
			Address: "127.0.0.1:9475",
			Report:  func(err error) { reports = append(reports, fmt.Sprint(err)) },
			listen: func(string) (net.Listener, error) {
				if tries++; tries < 4 {
					return nil, os.NewSyscallError("bind", unix.EADDRINUSE)
				}
				return nil, errors.New("no address")
			},
		}
		start := time.Now()
		if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no address") || !strings.Contains(err.Error(), "--metrics-bind-address") {
			t.Errorf("an address that can never be had: %v", err)
		}
		if took := time.Since(start); took != 3*retryListen {
			t.Errorf("four tries took %s, want %s", took, 3*retryListen)
		}
		want := []string{"bind: address already in use", "bind: address already in use", "bind: address already in use"}
		if diff := cmp.Diff(want, reports); diff != "" {
			t.Errorf("reported (-want +got):\n%s", diff)
		}
		tries = 0
		ctx, cancel := context.WithTimeout(t.Context(), retryListen)
		defer cancel()
		if err := s.Run(ctx); err != nil {
			t.Errorf("an end while the port is taken: %v", err)
		}
	})
}

// TestATakenPortInTheStatus: it is no part of health unless that was asked for.
func TestATakenPortInTheStatus(t *testing.T) {
	for _, required := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, iptables.NFT, setup{listenRequired: required})
			r.d.ReportListening(errors.New("address already in use"))
			r.after(2 * time.Second)
			s := r.d.Status()
			if s.ListenError != "address already in use" || s.Healthy == required {
				t.Errorf("required %t: healthy %t, error %q", required, s.Healthy, s.ListenError)
			}
			r.d.ReportListening(nil)
			r.after(2 * time.Second)
			if s := r.d.Status(); s.ListenError != "" || !s.Healthy {
				t.Errorf("once it is served: healthy %t, error %q", s.Healthy, s.ListenError)
			}
		})
	}
}
