package web

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
)

// retryListen is how often canaryd tries an address that another process uses.
const retryListen = 5 * time.Second

// A Listening serves HTTP at an address as soon as that address is free. Another process may
// use the port, which must not keep canaryd from guarding.
type Listening struct {
	Address string // HOST:PORT
	Handler http.Handler
	// Names are further names under which it answers, besides those of the loopback address and
	// of Address.
	Names []string
	// Report receives the reason why the address cannot be used, and nil once it can.
	Report func(error)

	listen func(address string) (net.Listener, error) // nil: net.Listen
}

// Run serves until ctx ends, and then returns nil. It fails at once for an address that can
// never be used, such as a malformed one.
func (s Listening) Run(ctx context.Context) error {
	l, err := s.await(ctx)
	if err != nil || l == nil {
		return err
	}
	return ServeHTTP(ctx, l, onlyFor(newOwnNames(s.Address, l.Addr(), s.Names), s.Handler))
}

// await returns the listener; nil if ctx ends before the address can be used. While another
// program has the address, it tries again each retryListen, and Report gets the error. Any
// other error is final.
func (s Listening) await(ctx context.Context) (net.Listener, error) {
	listen := s.listen
	if listen == nil {
		listen = func(address string) (net.Listener, error) { return net.Listen("tcp", address) }
	}
	again := time.NewTicker(retryListen)
	defer again.Stop()
	log := klog.FromContext(ctx)
	for tried := false; ; tried = true {
		l, err := listen(s.Address)
		switch {
		case err == nil:
			s.Report(nil)
			if tried {
				log.Info("Metrics, health and page are served from now on", "address", s.Address)
			}
			return l, nil
		case !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL):
			return nil, fmt.Errorf("%w (choose another with --metrics-bind-address, empty for none)", err)
		case !tried:
			severity.Warnings(log).Error(err, "Metrics, health and page are not served: the address is not available, and another program may answer there; rules stay guarded",
				"address", s.Address, "next", "trying again every "+retryListen.String())
		}
		s.Report(err)
		select {
		case <-ctx.Done():
			return nil, nil
		case <-again.C:
		}
	}
}
