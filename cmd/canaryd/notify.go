package main

import (
	"context"
	"fmt"
	"os"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/sdnotify"
	"github.com/canaryd/canaryd/internal/severity"
)

// notifyManager sends a message of sd_notify(3) to the service manager, if it started this process
// and listens.
func notifyManager(message string) error {
	if _, err := systemd.SdNotify(false, message); err != nil {
		return fmt.Errorf("telling the service manager: %w", err)
	}
	return nil
}

// startNotifier reports the daemon's state to the service manager until ctx ends. Without
// NOTIFY_SOCKET there is none, and it does nothing.
func startNotifier(ctx context.Context, group *errgroup.Group, d *daemon.Daemon) {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	watchdog, err := systemd.SdWatchdogEnabled(false)
	if err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(err, "The watchdog's variables cannot be read, so canaryd sends it no signal; the service manager may restart canaryd",
			"variables", "WATCHDOG_USEC, WATCHDOG_PID", "advice", "only WatchdogSec= of the unit may set them")
	}
	n := sdnotify.Notifier{Send: notifyManager, Status: d.Status, Alive: d.Alive, Watchdog: watchdog}
	group.Go(func() error { return n.Run(ctx) })
}
