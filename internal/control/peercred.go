package control

import (
	"context"
	"net"
	"os"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/serve"
	"github.com/canaryd/canaryd/internal/severity"
)

// A peerListener accepts connections from root and from canaryd's own user only. The mode of
// the socket ensures the same, but another process may change it. The listener reads no byte of
// another user's connection.
type peerListener struct {
	*net.UnixListener
	allowed func(uid uint32) bool
	log     klog.Logger
}

// newPeerListener returns l with connections only of root and our own user.
func newPeerListener(ctx context.Context, l *net.UnixListener) net.Listener {
	own := uint32(os.Geteuid())
	return &peerListener{
		UnixListener: l,
		allowed:      func(uid uint32) bool { return uid == 0 || uid == own },
		log:          klog.FromContext(ctx),
	}
}

// Accept returns the next connection of an allowed user, and closes all others.
func (p *peerListener) Accept() (net.Conn, error) {
	for {
		conn, err := p.AcceptUnix()
		if err != nil {
			return nil, err
		}
		peer, err := serve.PeerOf(conn)
		if err == nil && p.allowed(peer.Uid) {
			return conn, nil
		}
		conn.Close()
		if err != nil {
			severity.Warnings(p.log).Error(err, "A connection to the control socket was refused")
		} else {
			severity.Warnings(p.log).Info("A connection to the control socket was refused", "uid", peer.Uid, "pid", peer.Pid)
		}
	}
}
