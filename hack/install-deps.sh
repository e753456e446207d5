#!/usr/bin/env bash
# Installs the programs that make test and the demo run, where they are missing.
# Says nothing and touches nothing when all of them are there. Starts no service:
# the nftables package ships one, and apt must not load its rules on this machine.
# With the argument "optional" it is no failure that they cannot be installed: tests that
# need them are skipped. With CI=true it is one.
# With the argument "programs" it installs what else the packages of make test-programs run.
# With the argument "browser" it installs Chromium too, in which the page is
# tried, where the distribution has it as a package: Ubuntu has not.
# With the argument "flushers" it also unpacks the firewalls that test/flushers
# runs, beside the system, and does not install them: their packages enable
# services that would take over this machine's rules at its next start, and two
# of them exclude each other. Those that cannot be had are named, and the tests of
# them are skipped; with CI=true that is a failure.
# With the argument "kernels" it installs qemu, which test/kernels boots kernels in.
# With the argument "release" it unpacks in the same way what the image is made of, for all
# architectures, and containerd, which test/packaging loads the image with.
set -euo pipefail

optional=false with_programs=false with_flushers=false with_browser=false with_release=false with_kernels=false
here=$(cd "$(dirname "$0")" && pwd)
for word; do
	case $word in
	optional) optional=true ;;
	programs) with_programs=true ;;
	flushers) with_flushers=true ;;
	browser) with_browser=true ;;
	release) with_release=true ;;
	kernels) with_kernels=true ;;
	*) echo "install-deps: $word is no argument of this script" >&2 && exit 2 ;;
	esac
done

# program or file:package
needed=(
	iptables-nft:iptables
	iptables-legacy:iptables
	ip6tables-nft:iptables
	ip6tables-legacy:iptables
	nft:nftables
	ipset:ipset
	/etc/protocols:netbase
	ip:iproute2
	strace:strace
	setpriv:util-linux
)
if $with_programs; then
	needed+=(
		promtool:prometheus
		amtool:prometheus-alertmanager
		systemd-analyze:systemd
		mandoc:mandoc
		rpmbuild:rpm
		ssh-keygen:openssh-client
		zsh:zsh
		fish:fish
		/usr/lib/cni/portmap:containernetworking-plugins
	)
fi
if $with_flushers && ! { [ "$(id -u)" -eq 0 ] && command -v apt-get && command -v dpkg-deb; } >/dev/null; then
	echo "install-deps: only root runs test/flushers, with packages of Debian's; it is skipped"
	with_flushers=false
fi
if $with_release && ! { [ "$(id -u)" -eq 0 ] && command -v apt-get && command -v dpkg-deb; } >/dev/null; then
	echo "install-deps: only root tries the release, with packages of Debian's; it is skipped"
	with_release=false
fi
if $with_release; then
	needed+=(readelf:binutils rpmbuild:rpm ssh-keygen:openssh-client)
fi
if $with_kernels; then
	needed+=(qemu-system-x86_64:qemu-system-x86 qemu-system-aarch64:qemu-system-arm)
fi
if $with_flushers; then
	needed+=(
		dbus-daemon:dbus-daemon
		bc:bc
		shasum:perl
		/usr/bin/python3:python3
		/usr/lib/python3/dist-packages/dbus/__init__.py:python3-dbus
		/usr/lib/python3/dist-packages/gi/__init__.py:python3-gi
		/usr/lib/python3/dist-packages/nftables/__init__.py:python3-nftables
	)
fi

# What is unpacked, and where: each line wholly or not at all. test/flushers lays
# the folder over /usr and /etc in a mount namespace.
firewalls=(
	"firewalld python3-firewall"
	"ufw"
	"netfilter-persistent iptables-persistent"
	"shorewall shorewall6 shorewall-core"
	"fail2ban"
	"crowdsec-firewall-bouncer"
)
flushers=/var/cache/canaryd-test/flushers

# The image's parts in debian/ARCHITECTURE, and a container engine in engine.
release=/var/cache/canaryd-test/release
architectures=(amd64 arm64)
engine=(containerd runc)

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

# Any of these does; the first is the smallest.
browser=chromium-headless-shell
has_browser() {
	local name
	for name in chromium-headless-shell chromium chromium-browser google-chrome; do
		command -v $name >/dev/null && return
	done
	return 1
}
if $with_browser && ! has_browser && grep -qs '^ID=ubuntu$' /etc/os-release; then
	echo "install-deps: Ubuntu has no package with Chromium; tests of the page are skipped until there is one in PATH"
	with_browser=false
fi

missing_packages() {
	local pair
	for pair in "${needed[@]}"; do
		[[ $pair == /* && -e ${pair%%:*} ]] || command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
	done | sort -u
	! $with_browser || has_browser || echo $browser
}

# The last thing that is written says what was unpacked, and which way.
done_so="3: ${firewalls[*]}"
unpacked_flushers() { ! $with_flushers || [ "$(cat $flushers/.unpacked 2>/dev/null)" = "$done_so" ]; }
release_so="1: ${architectures[*]} ${engine[*]}"
unpacked_release() { ! $with_release || [ "$(cat $release/.unpacked 2>/dev/null)" = "$release_so" ]; }

mapfile -t packages < <(missing_packages)
[ ${#packages[@]} -eq 0 ] && unpacked_flushers && unpacked_release && exit 0

give_up() {
	echo "install-deps: $1" >&2
	if [ ${#packages[@]} -eq 0 ] && [ "${CI:-}" != true ]; then
		echo "Nothing but what is unpacked for test/flushers and test/packaging is missing: what they cannot run they skip." >&2
		exit 0
	fi
	if [ ${#packages[@]} -gt 0 ]; then
		echo "Please install these packages (Debian's names): ${packages[*]}" >&2
		echo "They provide $(printf '%s ' "${needed[@]%%:*}")" >&2
	fi
	if $optional && [ "${CI:-}" != true ]; then
		echo "Tests that need these programs are skipped." >&2
		exit 0
	fi
	! $with_flushers || echo "For test/flushers, Debian's packages ${firewalls[*]} are unpacked into $flushers." >&2
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

work=$(mktemp -d)
policy=/usr/sbin/policy-rc.d
forbade=false
clean_up() {
	rm -rf "$work"
	if $forbade; then "${as_root[@]}" rm -f $policy; fi
}
trap clean_up EXIT

logged() { "$@" >>"$work/log" 2>&1; }
failed() {
	tail -n 20 "$work/log" >&2
	give_up "$1 failed, see above."
}
apt() {
	logged "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=120 "$@"
}

apt update || failed "apt-get update"

# It is a package of its own since Debian 12.
if $with_browser && ! apt-cache show $browser >/dev/null 2>&1; then
	browser=chromium
	mapfile -t packages < <(missing_packages)
fi

if [ ${#packages[@]} -gt 0 ]; then
	echo "install-deps: installing ${packages[*]}"
	# invoke-rc.d asks this program whether a service may start; 101 says no.
	# A policy of the machine's own is left as it is.
	if [ ! -e $policy ]; then
		forbade=true
		printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee $policy >/dev/null
		"${as_root[@]}" chmod 755 $policy
	fi
	apt install --no-install-recommends --no-remove "${packages[@]}" || failed "apt-get install"
	mapfile -t packages < <(missing_packages)
	[ ${#packages[@]} -eq 0 ] || give_up "apt-get succeeded but programs are still missing."
fi

unpack() {
	cd "$work"
	mkdir new
	local firewall package lacking=()
	# All at once is quickest; if one of them is not to be had, the others may be.
	# shellcheck disable=SC2068 # a line is of several words
	logged apt-get download ${firewalls[@]} ||
		for firewall in "${firewalls[@]}"; do logged apt-get download $firewall || lacking+=("$firewall"); done
	for package in *.deb; do
		[[ " ${lacking[*]} " == *" ${package%%_*} "* ]] || logged dpkg-deb -x "$package" new || failed "dpkg-deb -x $package"
	done
	# Where /lib and /sbin are links into /usr, a layer over /usr is enough.
	mkdir -p new/usr/lib new/usr/sbin
	[ ! -d new/lib ] || cp -a new/lib/. new/usr/lib/
	[ ! -d new/sbin ] || cp -a new/sbin/. new/usr/sbin/
	rm -rf new/lib new/sbin new/var new/usr/share/doc new/usr/share/man new/usr/share/locale
	# As their packages do when they are installed; else every start compiles anew.
	if [ -d new/usr/lib/python3 ]; then logged /usr/bin/python3 -m compileall -q new/usr/lib/python3 || failed compileall; fi
	chmod 755 new
	rm -rf $flushers
	mkdir -p $flushers
	cp -a new/. $flushers/
	[ ${#lacking[@]} -eq 0 ] || failed "unpacking ${lacking[*]}"
	echo "$done_so" >$flushers/.unpacked
}

unpack_release() {
	local arch package
	rm -rf $release
	mkdir -p $release/engine
	for arch in "${architectures[@]}"; do
		logged "$here/debian-root.sh" "$arch" $release/debian/"$arch" || failed "unpacking what the image for $arch is made of"
	done
	mkdir "$work/engine"
	(cd "$work/engine" && logged apt-get download "${engine[@]}") || failed "downloading ${engine[*]}"
	for package in "$work"/engine/*.deb; do
		logged dpkg-deb -x "$package" $release/engine || failed "dpkg-deb -x $package"
	done
	echo "$release_so" >$release/.unpacked
}

# First: what cannot be had of the firewalls ends the script.
if ! unpacked_release; then
	echo "install-deps: unpacking what a release is made of and tried with into $release"
	unpack_release
fi
if ! unpacked_flushers; then
	echo "install-deps: unpacking ${firewalls[*]} into $flushers"
	unpack
fi
