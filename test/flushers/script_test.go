package flushers

// scriptFlushers are administrators' own scripts.
func scriptFlushers() []flusher {
	return []flusher{{
		name: "a playbook",
		install: func(m *machine) {
			m.write("/run/firewall.sh", playbook)
		},
		steps: []step{
			{name: "policies, `-F` everywhere, 24 rules in 6 s", does: play, loses: both, late: appends},
			{name: "the same again", does: play, loses: both, late: appends},
		},
	}}
}

func play(m *machine) {
	pause := "0.25"
	if m.hurry {
		pause = "0"
	}
	m.run("sh", "/run/firewall.sh", pause)
}

// playbook does the same as the tasks of a playbook: first the important parts, then rule by
// rule.
const playbook = `
for iptables in iptables ip6tables; do
	$iptables -w -P INPUT DROP
	$iptables -w -P FORWARD DROP
	$iptables -w -P OUTPUT ACCEPT
	for table in filter nat mangle; do $iptables -w -t $table -F; done
	$iptables -w -A INPUT -i lo -j ACCEPT
	$iptables -w -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
done
for port in 22 80 443 2379 2380 6443 9100 10250 10256 30000; do
	for iptables in iptables ip6tables; do
		$iptables -w -A INPUT -p tcp --dport $port -j ACCEPT
		sleep $1
	done
done
for iptables in iptables ip6tables; do
	$iptables -w -A FORWARD -i tun0 -o eth0 -j ACCEPT
	sleep $1
	$iptables -w -t nat -A POSTROUTING -o wg0 -j MASQUERADE
	sleep $1
done
`
