#!/usr/bin/env bash
# Unpacks the userlands that test/versions runs canaryd in: iptables, nft, ipset and
# what they need, from Debian's packages of four suites. Nothing is installed: apt
# gets folders of its own, and packages are unpacked below /var/cache/canaryd-test.
# What is unpacked is kept, and sid's for a week. What cannot be had is named, and its
# tests are skipped; with CI=true that is a failure.
# With an architecture and suites as arguments it unpacks those instead, into
# userlands-ARCHITECTURE: test/kernels boots them.
set -euo pipefail
# shellcheck source=hack/unpack.sh
. "$(dirname "$0")/unpack.sh"

arch=amd64
suites=(bullseye bookworm trixie sid)
userlands=/var/cache/canaryd-test/userlands
if [ $# -gt 0 ]; then
	arch=$1 userlands=$userlands-$1
	shift
	suites=("$@")
fi
# After iptables, nft and ipset stands what the tests execute besides them.
packages=(iptables nftables ipset bash coreutils dash grep iproute2 mount netbase procps sed util-linux)
# The last thing that is written says what was unpacked, and which way.
done_so="1: ${packages[*]}"

give_up() {
	echo "userlands: $1" >&2
	[ "${CI:-}" != true ] || exit 1
	echo "userlands: without them test/versions and test/kernels are skipped." >&2
	exit 0
}

unpacked() { # SUITE
	local stamp=$userlands/$1/.unpacked
	[ "$(cat "$stamp" 2>/dev/null)" = "$done_so" ] || return
	[ "$1" != sid ] || [ -z "$(find "$stamp" -mtime +6)" ]
}

missing=()
for suite in "${suites[@]}"; do unpacked "$suite" || missing+=("$suite"); done
[ ${#missing[@]} -gt 0 ] || exit 0

lack=$(what_lacks)
[ -z "$lack" ] || give_up "$lack"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

unpack() { # SUITE
	local root=$work/root
	mkdir -p "$root"/{etc,proc,sys,dev,run,var}
	mkdir -m 1777 "$root/tmp"
	suite "$1" "$arch" && unpack_with "$root" "${packages[@]}" || return
	# What packages make when they are installed.
	[ -e "$root/bin/sh" ] || ln -s dash "$root/bin/sh" || return
	printf '%s: files\n' passwd group protocols services >"$root/etc/nsswitch.conf" || return
	# Where test/versions mounts canaryd's sources and what it built of them.
	mkdir -p "$root"/src "$root"/builds
	rm -rf "$root"/usr/share/{doc,man,locale,info,bash-completion} "${userlands:?}/$1"
	mkdir -p $userlands && cp -a "$root" "$userlands/$1" || return
	echo "$done_so" >"$userlands/$1/.unpacked"
}

lacking=()
for suite in "${missing[@]}"; do
	echo "userlands: unpacking $suite into $userlands/$suite"
	unpack "$suite" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2 && lacking+=("$suite"); }
	rm -rf "${work:?}"/*/
done
[ ${#lacking[@]} -eq 0 ] || give_up "cannot be had: ${lacking[*]}."
