package control

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
)

// listener returns the path of a socket whose first connection answer gets, and then closes.
func listener(t *testing.T, answer func(net.Conn)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		answer(conn)
	}()
	return path
}

// TestNotCanaryd: a process that is not canaryd listens at the socket. The client must say so,
// and name a remedy, for each way in which the process treats the connection.
func TestNotCanaryd(t *testing.T) {
	for name, answer := range map[string]string{
		"another protocol":  "220 mail.example.org ESMTP\r\n",
		"nothing":           "",
		"another HTTP":      "HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nnobody",
		"a page":            "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
		"half of an answer": "HTTP/1.1 20",
	} {
		t.Run(name, func(t *testing.T) {
			path := listener(t, func(conn net.Conn) {
				_, _ = conn.Read(make([]byte, 1024))
				_, _ = io.WriteString(conn, answer)
			})
			_, err := Client{Socket: path}.Status(t.Context())
			if answer == "" && os.Geteuid() != 0 {
				// A canaryd of another user answers like this, too.
				if !errors.Is(err, ErrForbidden) {
					t.Errorf("got %v, want %v", err, ErrForbidden)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), ErrNotCanaryd.Error()) || !strings.HasPrefix(err.Error(), path) || errors.Is(err, ErrNoDaemon) {
				t.Errorf("got %v", err)
			}
		})
	}
	datagrams := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: datagrams, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := (Client{Socket: datagrams}).Status(t.Context()); !errors.Is(err, ErrNotCanaryd) {
		t.Errorf("a socket for datagrams: %v", err)
	}
}

// TestForbidden: a user who may not open the socket learns which users may.
func TestForbidden(t *testing.T) {
	client := Client{Socket: "/run/canaryd/canaryd.sock"}
	err := client.explain(t.Context(), &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", unix.EACCES)}, false)
	if want := "only root, and the user that canaryd runs as, may ask canaryd at /run/canaryd/canaryd.sock"; !errors.Is(err, ErrForbidden) || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := client.explain(ctx, io.EOF, true); !errors.Is(err, context.Canceled) || errors.Is(err, ErrForbidden) {
		t.Errorf("a request that was given up: %v", err)
	}
}

// TestAnswerBeforeTheWholeRequest: a listener refuses a request before it has read it, and
// closes the connection. The client must show that answer, and not that it could not write.
func TestAnswerBeforeTheWholeRequest(t *testing.T) {
	path := listener(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "HTTP/1.1 413 Too Large\r\nContent-Length: 36\r\n\r\n"+`{"error":"the request is too large"}`)
	})
	_, err := Client{Socket: path}.Baseline(t.Context(), api.BaselineRequest{Generation: strings.Repeat("x", 8<<20)})
	if refused := (&RefusedError{}); !errors.As(err, &refused) || refused.Code != http.StatusRequestEntityTooLarge || err.Error() != "the request is too large" {
		t.Errorf("got %v", err)
	}
}

// TestRequestGivenUp: the end of the context ends a request whose answer never comes, and one
// whose answer never ends, with the context's error.
func TestRequestGivenUp(t *testing.T) {
	for name, begin := range map[string]string{
		"no answer":      "",
		"half an answer": "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			path := listener(t, func(conn net.Conn) {
				_, _ = conn.Read(make([]byte, 1024))
				_, _ = io.WriteString(conn, begin)
				cancel()
				_, _ = io.Copy(io.Discard, conn) // until the client closes
			})
			if _, err := (Client{Socket: path}).Resume(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v", err)
			}
		})
	}
}
