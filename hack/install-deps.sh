#!/usr/bin/env bash
# Installs the programs that the tests and the demo run, where they are missing.
# Says nothing and touches nothing when all of them are there. Starts no service:
# the nftables package ships one, and apt must not load its rules on this machine.
set -euo pipefail

# program:package
needed=(
	iptables-nft:iptables
	iptables-legacy:iptables
	ip6tables-nft:iptables
	ip6tables-legacy:iptables
	nft:nftables
	ipset:ipset
	ip:iproute2
	strace:strace
	promtool:prometheus
	systemd-analyze:systemd
	setpriv:util-linux
	mandoc:mandoc
	zsh:zsh
	fish:fish
	/usr/lib/cni/portmap:containernetworking-plugins
)

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

missing_packages() {
	local pair
	for pair in "${needed[@]}"; do
		command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
	done | sort -u
}

mapfile -t packages < <(missing_packages)
[ ${#packages[@]} -eq 0 ] && exit 0

give_up() {
	echo "install-deps: $1" >&2
	echo "Please install these packages (Debian's names): ${packages[*]}" >&2
	echo "They must provide iptables-nft, iptables-legacy, their ip6tables twins, nft, ipset, ip, strace, promtool, setpriv, systemd-analyze and the CNI plugins." >&2
	exit 1
}

command -v apt-get >/dev/null || give_up "there is no apt-get here."

as_root=()
if [ "$(id -u)" -ne 0 ]; then
	command -v sudo >/dev/null || give_up "this is not root and there is no sudo."
	# Without a terminal a password question would wait for ever.
	if [ -t 0 ] && [ "${CI:-}" != true ]; then as_root=(sudo); else as_root=(sudo -n); fi
	"${as_root[@]}" true || give_up "sudo is refused."
fi

echo "install-deps: installing ${packages[*]}"

# invoke-rc.d asks this program whether a service may start; 101 says no.
# A policy of the machine's own is left as it is.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	trap '"${as_root[@]}" rm -f $policy' EXIT
	printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee $policy >/dev/null
	"${as_root[@]}" chmod 755 $policy
fi

log=$(mktemp)
apt() {
	"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=120 "$@" >>"$log" 2>&1
}
if ! { apt update && apt install --no-install-recommends "${packages[@]}"; }; then
	tail -n 20 "$log" >&2
	rm -f "$log"
	give_up "apt-get failed, see above."
fi
rm -f "$log"

mapfile -t packages < <(missing_packages)
[ ${#packages[@]} -eq 0 ] || give_up "apt-get succeeded but programs are still missing."
