package main

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// elsewhere opens the backend that is not guarded, for reading only.
func (o *options) elsewhere(ctx context.Context, backend iptables.Backend) (daemon.Reader, func(), error) {
	cfg := o.kernelConfig()
	cfg.Backend, cfg.Replay = backend, iptables.ReplayAuto
	kernel, err := iptables.Open(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	return kernel, func() {
		if err := kernel.Close(); err != nil {
			klog.FromContext(ctx).Error(err, "The other backend could not be closed", "backend", backend)
		}
	}, nil
}
