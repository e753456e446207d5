package flushers

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
)

// A crowdsec is CrowdSec's firewall bouncer, with a local API that has decisions of its own.
type crowdsec struct {
	mode      string
	mu        sync.Mutex
	decisions []string // banned addresses, in order
	told      int      // the number that the bouncer has received; -1: no query since its start
	bouncer   *service
}

// install serves the API at the address of the bouncer's configuration.
func (c *crowdsec) install(m *machine) {
	listener, err := net.Listen("tcp4", "127.0.0.1:60606")
	m.Must(err)
	server := &http.Server{Handler: c}
	m.Cleanup(func() { server.Close() })
	go func() { _ = server.Serve(listener) }() // the server ends with the test
	m.write("/etc/crowdsec/bouncers/bouncer.yaml", `mode: `+c.mode+`
pid_dir: /run/
update_frequency: 500ms
daemonize: true
log_mode: stdout
log_level: info
api_url: http://127.0.0.1:60606/
api_key: key
disable_ipv6: false
deny_action: DROP
deny_log: false
supported_decisions_types: [ban]
blacklists_ipv4: crowdsec-blacklists
blacklists_ipv6: crowdsec6-blacklists
ipset_type: nethash
iptables_chains: [INPUT, FORWARD]
nftables:
  ipv4: {enabled: true, set-only: false, table: crowdsec, chain: crowdsec-chain}
  ipv6: {enabled: true, set-only: false, table: crowdsec6, chain: crowdsec6-chain}
prometheus: {enabled: false}
`)
}

// ServeHTTP answers the bouncer's query for new decisions.
func (c *crowdsec) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.URL.Query().Get("startup") == "true" {
		c.told = 0
	}
	list := []map[string]any{}
	for i, value := range c.decisions {
		if i >= c.told {
			list = append(list, map[string]any{
				"id": i + 1, "duration": "3h59m30s", "origin": "cscli", "scenario": "manual 'ban'", "scope": "Ip", "type": "ban", "value": value,
			})
		}
	}
	c.told = len(c.decisions)
	_ = json.NewEncoder(w).Encode(map[string]any{"new": list, "deleted": []any{}}) // the client repeats
}

func (c *crowdsec) start(m *machine) {
	c.mu.Lock()
	c.told = -1
	c.mu.Unlock()
	c.bouncer = m.launch("crowdsec-firewall-bouncer", "-c", "/etc/crowdsec/bouncers/bouncer.yaml")
	m.Until("the bouncer to ask", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.told < 0 { // the bouncer queries once its rules exist
			return errors.New("it has not")
		}
		return nil
	})
	c.add(m, 1)
}

func (c *crowdsec) stop(m *machine) { m.stop(c.bouncer) }

// add bans the host of that number in both families.
func (c *crowdsec) add(m *machine, host int) {
	v4, v6 := fmt.Sprintf("192.0.2.%d", host), fmt.Sprintf("2001:db8::%d", host)
	c.mu.Lock()
	if !strings.Contains(strings.Join(c.decisions, " ")+" ", v4+" ") {
		c.decisions = append(c.decisions, v4, v6)
	}
	c.mu.Unlock()
	listed := "ipset list crowdsec-blacklists | grep -w " + v4 + " && ipset list crowdsec6-blacklists | grep -w " + v6
	if c.mode == "nftables" {
		listed = "nft list table ip crowdsec | grep -w " + v4 + " && nft list table ip6 crowdsec6 | grep -w " + v6
	}
	m.until(c.bouncer, "sh", "-c", listed)
}

func crowdsecOwner(mode string) owner {
	c := &crowdsec{mode: mode}
	return owner{
		name: "crowdsec, " + mode, preset: "crowdsec", unpacked: []string{"usr/bin/crowdsec-firewall-bouncer"},
		install: c.install, start: c.start, stop: c.stop, adds: c.add,
	}
}
