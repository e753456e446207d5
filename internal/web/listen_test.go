package web

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/serve"
)

// TestIdleConnectionsKeepNoProbeWaiting: 900 connections without any request, and 900 with half
// a request, are open. A probe must still be answered, and so must a request that arrived
// before them.
func TestIdleConnectionsKeepNoProbeWaiting(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	began, finish := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { serve.WriteCheck(w, nil, "ok") })
	mux.HandleFunc("/slow", func(w http.ResponseWriter, _ *http.Request) {
		close(began)
		<-finish
		serve.WriteCheck(w, nil, "ok")
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

// TestASquatterOnThePort: another process has the port. canaryd tries again, reports that once
// and in the status, and serves as soon as the port is free.
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
