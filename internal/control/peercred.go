package control

import (
	"context"
	"net"
	"os"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/serve"
)

// A peerListener hands out only connections from root and from our own user.
// The socket's mode says the same; this holds even if somebody changes it.
// From anybody else not one byte is read.
type peerListener struct {
	*net.UnixListener
	allowed func(uid uint32) bool
	log     klog.Logger
}

func newPeerListener(ctx context.Context, l *net.UnixListener) net.Listener {
	own := uint32(os.Geteuid())
	return &peerListener{
		UnixListener: l,
		allowed:      func(uid uint32) bool { return uid == 0 || uid == own },
		log:          klog.FromContext(ctx),
	}
}

// Accept waits for the next connection of somebody who may connect.
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
			p.log.Error(err, "A connection to the control socket was refused")
		} else {
			p.log.Info("A connection to the control socket was refused", "uid", peer.Uid, "pid", peer.Pid)
		}
	}
}
