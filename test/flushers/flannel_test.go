package flushers

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// flanneld is a program that hack/owners.sh builds from flannel's package for its rules.
const flanneld = "/var/cache/canaryd-test/owners/flanneld"

// A flannel is flanneld in one of its modes.
type flannel struct {
	native bool
	daemon *service
}

// start starts flanneld, and returns once its rules are written. In iptables mode it looks for
// them each second.
func (f *flannel) start(m *machine) {
	const said = "/run/flanneld.log"
	m.Must(os.RemoveAll(said))
	f.daemon = m.launch("sh", "-c", fmt.Sprintf("exec %s -nftables=%t -iptables-resync=1 >%s 2>&1", flanneld, f.native, said))
	m.Until("flanneld to write its rules", func() error {
		text, err := os.ReadFile(said)
		if err == nil && !strings.Contains(string(text), "the rules are written") {
			err = errors.New(string(text))
		}
		return err
	})
}

func (f *flannel) restart(m *machine) {
	m.stop(f.daemon)
	f.start(m)
}

// remove ends flanneld, which leaves its rules. A start in iptables mode deletes those of
// nftables mode, and an administrator deletes iptables' rules by name.
func (f *flannel) remove(m *machine) {
	m.stop(f.daemon)
	if f.native {
		other := &flannel{}
		other.start(m)
		m.stop(other.daemon)
	}
	for _, program := range []string{"iptables", "ip6tables"} {
		m.run(program, "-w", "-t", "nat", "-D", "POSTROUTING", "-m", "comment", "--comment", "flanneld masq", "-j", "FLANNEL-POSTRTG")
		m.run(program, "-w", "-D", "FORWARD", "-m", "comment", "--comment", "flanneld forward", "-j", "FLANNEL-FWD")
		for _, c := range [][]string{{"nat", "FLANNEL-POSTRTG"}, {"filter", "FLANNEL-FWD"}} {
			m.run(program, "-w", "-t", c[0], "-F", c[1])
			m.run(program, "-w", "-t", c[0], "-X", c[1])
		}
	}
}

func flannelOwner(mode string) owner {
	f := &flannel{native: mode == "nftables"}
	o := owner{name: "flannel, " + mode, preset: "flannel", built: flanneld, install: func(*machine) {}, start: f.start, stop: f.remove, restarts: f.restart}
	if !f.native {
		o.watches = true
		o.syncs = func(m *machine) { m.Polled(2) } // flanneld looks meanwhile
	}
	return o
}
