package web

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// ownNames are the values of a request's Host header that canaryd answers. A web site in a
// browser on the node can resolve its own name to canaryd's address (DNS rebinding), and would
// then read the answers. The browser still sends the site's name.
type ownNames struct {
	everyAddress bool // canaryd listens at all addresses
	addresses    map[netip.Addr]bool
	names        map[string]bool
}

// newOwnNames returns the names of a server that is bound to HOST:PORT and listens at an
// address, with further names. They always include the names of the loopback address.
func newOwnNames(bind string, listening net.Addr, further []string) ownNames {
	o := ownNames{addresses: map[netip.Addr]bool{}, names: map[string]bool{"localhost": true}}
	for _, name := range further {
		o.add(name)
	}
	o.add(hostOf(bind))
	if listening != nil {
		o.add(hostOf(listening.String()))
	}
	return o
}

// add adds a name or an address. An unspecified address, or "", means that the server listens
// on every address.
func (o *ownNames) add(host string) {
	addr, err := netip.ParseAddr(host)
	switch {
	case host == "" || err == nil && addr.IsUnspecified():
		o.everyAddress = true
	case err == nil:
		o.addresses[plainAddr(addr)] = true
	default:
		o.names[plainName(host)] = true
	}
}

// has reports whether a Host header names this server; onlyFor refuses other requests, which a
// hostile page may have sent (DNS rebinding). It ignores the port, which a tunnel changes.
// Without a header the client is no browser.
func (o *ownNames) has(header string) bool {
	if header == "" {
		return true
	}
	host := hostOf(header)
	if addr, err := netip.ParseAddr(host); err == nil {
		return o.everyAddress || addr.Unmap().IsLoopback() || o.addresses[plainAddr(addr)]
	}
	return o.names[plainName(host)]
}

// hostOf returns the host of HOST:PORT, HOST or [HOST].
func hostOf(text string) string {
	if host, _, err := net.SplitHostPort(text); err == nil {
		return host
	}
	if inner, ok := strings.CutPrefix(text, "["); ok {
		return strings.TrimSuffix(inner, "]")
	}
	return text
}

// plainAddr returns an address without its zone, which a Host header does not have.
func plainAddr(addr netip.Addr) netip.Addr { return addr.Unmap().WithZone("") }

func plainName(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// onlyFor answers requests for other hosts with 421 and a remedy, against DNS rebinding. next
// gets all others.
func onlyFor(own ownNames, next http.Handler) http.Handler {
	return guarded(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if own.has(r.Host) {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(http.StatusMisdirectedRequest)
		fmt.Fprintf(w, "canaryd does not answer under the name %.100q. Ask for its address, or for localhost on the node, or name it to canaryd: --metrics-host=NAME\n", r.Host)
	}))
}

// CheckHostName returns why a Host header without a port cannot have this name, for
// --metrics-host; nil if it can.
func CheckHostName(name string) error {
	if _, err := netip.ParseAddr(name); err == nil {
		return nil
	}
	if name == "" || strings.Trim(strings.ToLower(name), "abcdefghijklmnopqrstuvwxyz0123456789-._") != "" {
		return fmt.Errorf("%q is no name of a host: want one without a port, or an address", name)
	}
	return nil
}
