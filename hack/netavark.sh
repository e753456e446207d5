#!/usr/bin/env bash
# Unpacks podman's netavark, which test/owners runs next to canaryd, from Debian's trixie: the first
# release whose netavark writes nftables. Nothing is installed: the program, nft and the libraries
# that they need stand in one folder, and run with the loader in it on any distribution. What
# cannot be had is named, and its test is skipped; with CI=true that is a failure.
set -euo pipefail
# shellcheck source=hack/unpack.sh
. "$(dirname "$0")/unpack.sh"

root=/var/cache/canaryd-test/netavark
packages=(netavark nftables)
done_so="1: ${packages[*]}"

give_up() {
	echo "netavark: $1" >&2
	[ "${CI:-}" != true ] || exit 1
	echo "netavark: without it its test in test/owners is skipped." >&2
	exit 0
}

[ "$(uname -m)" = x86_64 ] || give_up "this machine is no amd64."
[ "$(cat $root/.unpacked 2>/dev/null)" != "$done_so" ] || exit 0
lack=$(what_lacks)
[ -z "$lack" ] || give_up "$lack"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "netavark: unpacking ${packages[*]} into $root"
unpack() {
	suite trixie amd64 && unpack_with "$work/root" "${packages[@]}" || return
	rm -rf "$work"/root/usr/share/{doc,man,locale,info,bash-completion} $root
	mkdir -p "$(dirname $root)" && cp -a "$work/root" $root || return
	echo "$done_so" >$root/.unpacked
}
unpack >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2 && give_up "it cannot be had."; }
