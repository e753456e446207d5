package alerts

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

const routeFile = "../../deploy/prometheus/alertmanager.route.yaml"

// TestRoutes: Alertmanager takes the example of its routing, which sends each alert to the
// receiver for its severity.
func TestRoutes(t *testing.T) {
	t.Parallel()
	nstest.NeedProgram(t, "amtool")
	amtool := func(args ...string) string {
		t.Helper()
		var out, errs strings.Builder // amtool warns that a flag overrides a default
		cmd := exec.CommandContext(t.Context(), "amtool", args...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil {
			t.Errorf("amtool %s: %v\n%s", strings.Join(args, " "), err, &errs)
		}
		return strings.TrimSpace(out.String())
	}
	amtool("check-config", routeFile)
	receiver := map[string]string{"critical": "page", "warning": "ticket", "info": "record"}
	want, got := map[string]string{}, map[string]string{}
	for _, a := range alerts(t) {
		severity := a.Labels["severity"]
		want[a.Alert] = receiver[severity]
		got[a.Alert] = amtool("config", "routes", "test", "--config.file="+routeFile, "alertname="+a.Alert, "severity="+severity, "cluster=one", "instance=node-1")
	}
	want["KubeNodeNotReady"] = "everything-else"
	got["KubeNodeNotReady"] = amtool("config", "routes", "test", "--config.file="+routeFile, "alertname=KubeNodeNotReady", "severity=critical")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("receivers (-want +got):\n%s", diff)
	}
}
