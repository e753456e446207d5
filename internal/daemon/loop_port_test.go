package daemon

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestATakenPortInTheStatus: a taken port affects health only with --metrics-required.
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
