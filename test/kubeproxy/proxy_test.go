package kubeproxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
)

// program is the environment variable with kube-proxy's path, which hack/kubeproxy.sh sets.
const program = "CANARYD_TEST_KUBE_PROXY"

// The modes of kube-proxy.
const (
	inIPTables = "iptables"
	inNFTables = "nftables"
)

// A proxy is a kube-proxy.
type proxy struct {
	*testing.T
	space *space
	mode  string
	log   string // path
	cmd   *exec.Cmd
	ended chan error
}

// flags returns kube-proxy's flags that differ from its defaults, without the mode. The
// kernel's limits of conntrack are the machine's, and stay unchanged.
func flags() []string {
	return []string{
		"--master=http://" + apiAddress, "--kube-api-content-type=application/json", "--hostname-override=" + nodeName,
		"--cluster-cidr=" + podsIPv4 + "," + podsIPv6, "--conntrack-max-per-core=0", "--conntrack-min=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--v=2",
	}
}

// startProxy starts a kube-proxy, and returns once it has synced both families.
func startProxy(t *testing.T, s *space, mode string) *proxy {
	t.Helper()
	p := &proxy{T: t, space: s, mode: mode, ended: make(chan error, 1)}
	p.log = filepath.Join("/run", fmt.Sprintf("kube-proxy-%s-%d.log", s.name, time.Now().UnixNano()))
	out, err := os.Create(p.log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p.cmd = s.command(t.Context(), os.Getenv(program), append(flags(), "--proxy-mode="+mode)...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	// A streamed list is only another way to the same objects.
	p.cmd.Env = append(slices.Clone(p.cmd.Env), "KUBE_FEATURE_WatchListClient=false")
	if err := s.in(p.cmd.Start); err != nil {
		t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	t.Cleanup(func() {
		p.end(syscall.SIGKILL)
		if t.Failed() {
			t.Logf("kube-proxy in %s:\n%s", s.name, p.tail(30))
		}
	})
	testkit.Until(t, "kube-proxy's first syncs in "+s.name, func() error {
		select {
		case err := <-p.ended:
			p.ended <- err
			t.Fatalf("kube-proxy ended at once: %v\n%s", err, p.tail(30))
		default:
		}
		m, err := p.metrics()
		if err == nil && m.count("sync_proxy_rules_last_timestamp_seconds") != 2 {
			err = errors.New("not synced")
		}
		return err
	})
	return p
}

// end ends kube-proxy with a signal, and waits. A second call is allowed.
func (p *proxy) end(s syscall.Signal) {
	p.Helper()
	_ = p.cmd.Process.Signal(s) // it may have ended
	p.ended <- testkit.Receive(p.T, p.ended, "kube-proxy in "+p.space.name+" to end")
}

// cleanUp runs kube-proxy --cleanup.
func cleanUp(t *testing.T, s *space) {
	t.Helper()
	if _, err := s.run(t.Context(), "", os.Getenv(program), "--cleanup"); err != nil {
		t.Fatal(err)
	}
}

// samples are kube-proxy's metrics: values by name and labels.
type samples map[string]float64

// metrics returns the metrics of kube-proxy's subsystem.
func (p *proxy) metrics() (samples, error) {
	response, err := p.space.client().Get("http://127.0.0.1:10249/metrics")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	all := samples{}
	for line := range strings.Lines(string(text)) {
		name, value, found := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "kubeproxy_"), " ")
		if n, err := strconv.ParseFloat(value, 64); found && err == nil {
			all[name] = n
		}
	}
	return all, err
}

// count returns the number of a metric's samples above 0.
func (m samples) count(name string) (n int) {
	for key, value := range m {
		if (key == name || strings.HasPrefix(key, name+"{")) && value > 0 {
			n++
		}
	}
	return n
}

// sum adds a metric's samples.
func (m samples) sum(name string) (n int) {
	for key, value := range m {
		if key == name || strings.HasPrefix(key, name+"{") {
			n += int(value)
		}
	}
	return n
}

// Syncs are kube-proxy's counts of its syncs, both families together.
type syncs struct {
	all, full int
	reloads   int // full syncs because its canary was missing
	failed    int
	cameBack  int // failed syncs because a removed object was back, by a replay
}

// syncs returns kube-proxy's counts.
func (p *proxy) syncs() syncs {
	p.Helper()
	m, err := p.metrics()
	if err != nil {
		p.Fatal(err)
	}
	s := syncs{
		all: m.sum("sync_proxy_rules_duration_seconds_count"), full: m.sum("sync_full_proxy_rules_duration_seconds_count"),
		reloads: len(p.lines(`Reloading after iptables flush`)),
	}
	for _, c := range p.complaints() {
		s.failed++
		if cameBack.MatchString(c.text) {
			s.cameBack++
		}
	}
	return s
}

// cameBack matches the kernel's words for a chain that still has a jump, and for an element
// that already exists.
var cameBack = regexp.MustCompile(`Device or resource busy|File exists`)

// A complaint is an error in kube-proxy's log, with its cause.
type complaint struct {
	at   time.Time
	text string
}

var (
	logged = regexp.MustCompile(`^E(\d{4} \d\d:\d\d:\d\d\.\d{6}) +\d+ \S+\] (.*)$`)
	// quiet matches errors that are no failed sync: this kernel has no nfacct, and kube-proxy
	// cannot list a missing table before it makes it again.
	quiet = regexp.MustCompile(`nfacct|nodePortAddresses|conntrack|Failed to list existing nftables objects`)
)

// complaints returns kube-proxy's logged errors about rules.
func (p *proxy) complaints() []complaint {
	p.Helper()
	var all []complaint
	open := false // the error has more lines
	for _, line := range p.lines("") {
		m := logged.FindStringSubmatch(line)
		switch {
		case m != nil && !quiet.MatchString(m[2]):
			at, err := time.ParseInLocation("20060102 15:04:05.000000", time.Now().Format("2006")+m[1], time.Local)
			if err != nil {
				p.Fatal(err)
			}
			all, open = append(all, complaint{at, m[2]}), true
		case open && strings.HasPrefix(line, "\t"):
			all[len(all)-1].text += " " + strings.TrimSpace(line)
		default:
			open = false
		}
	}
	return all
}

// lines returns the lines of kube-proxy's log that match a pattern.
func (p *proxy) lines(pattern string) []string {
	p.Helper()
	file, err := os.Open(p.log)
	if err != nil {
		p.Fatal(err)
	}
	defer file.Close()
	var all []string
	wanted := regexp.MustCompile(pattern)
	scan := bufio.NewScanner(file)
	for scan.Buffer(nil, 1<<22); scan.Scan(); {
		if wanted.MatchString(scan.Text()) {
			all = append(all, scan.Text())
		}
	}
	if err := scan.Err(); err != nil {
		p.Fatal(err)
	}
	return all
}

// tail returns the last lines of kube-proxy's log.
func (p *proxy) tail(n int) string {
	all := p.lines("")
	return strings.Join(all[max(0, len(all)-n):], "\n")
}
