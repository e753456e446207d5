#!/usr/bin/env bash
# Unpacks the userlands that test/versions runs canaryd in: iptables, nft, ipset and
# what they need, from Debian's packages of four suites. Nothing is installed: apt
# gets folders of its own, and packages are unpacked below /var/cache/canaryd-test.
# What is unpacked is kept, and sid's for a week. What cannot be had is named, and its
# tests are skipped; with CI=true that is a failure.
set -euo pipefail

suites=(bullseye bookworm trixie sid)
# After iptables, nft and ipset stands what the tests execute besides them.
packages=(iptables nftables ipset bash coreutils dash grep iproute2 mount netbase procps sed util-linux)
userlands=/var/cache/canaryd-test/userlands
keys=/usr/share/keyrings/debian-archive-keyring.gpg
# The last thing that is written says what was unpacked, and which way.
done_so="1: ${packages[*]}"

give_up() {
	echo "userlands: $1" >&2
	[ "${CI:-}" != true ] || exit 1
	echo "userlands: without them test/versions is skipped." >&2
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

[ "$(id -u)" -eq 0 ] || give_up "only root runs test/versions."
for program in apt-get dpkg-deb; do
	command -v $program >/dev/null || give_up "there is no $program here."
done
[ -e $keys ] || give_up "$keys is not here: install debian-archive-keyring."

# The mirror is the one that this machine uses, if it uses one of Debian's.
mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
	sed -n 's/^Debian \(.*[^/]\)\/*$/\1/p' | grep '/debian$' | head -n 1) || true
mirror=${mirror:-http://deb.debian.org/debian}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

unpack() { # SUITE
	local suite=$1 root=$work/$1/root package
	mkdir -p "$work/$suite"/{lists,cache/archives/partial} "$root"/{etc,proc,sys,dev,run,var} "$root"/usr/{bin,sbin,lib,lib64}
	mkdir -m 1777 "$root/tmp"
	echo "deb [signed-by=$keys] $mirror $suite main" >"$work/$suite/sources"
	: >"$work/$suite/status"
	local apt=(apt-get -y -o Dir::Etc::sourcelist="$work/$suite/sources" -o Dir::Etc::sourceparts=/dev/null
		-o Dir::State::lists="$work/$suite/lists" -o Dir::State::status="$work/$suite/status"
		-o Dir::Cache="$work/$suite/cache" -o Acquire::Languages=none -o APT::Sandbox::User=root
		-o APT::Install-Recommends=0 -o Debug::NoLocking=1)
	"${apt[@]}" update && "${apt[@]}" --download-only install "${packages[@]}" || return
	# Old packages have files in /bin and /lib, where the system has links into /usr.
	for package in bin sbin lib lib64; do ln -s usr/$package "$root/$package" || return; done
	for package in "$work/$suite"/cache/archives/*.deb; do
		dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root" || return
	done
	# What packages make when they are installed.
	[ -e "$root/bin/sh" ] || ln -s dash "$root/bin/sh" || return
	printf '%s: files\n' passwd group protocols services >"$root/etc/nsswitch.conf" || return
	# Where test/versions mounts canaryd's sources and what it built of them.
	mkdir -p "$root"/src "$root"/builds
	rm -rf "$root"/usr/share/{doc,man,locale,info,bash-completion} "$userlands/$suite"
	mkdir -p $userlands && cp -a "$root" "$userlands/$suite" || return
	echo "$done_so" >"$userlands/$suite/.unpacked"
}

lacking=()
for suite in "${missing[@]}"; do
	echo "userlands: unpacking $suite into $userlands/$suite"
	unpack "$suite" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2 && lacking+=("$suite"); }
	rm -rf "${work:?}/$suite"
done
[ ${#lacking[@]} -eq 0 ] || give_up "cannot be had: ${lacking[*]}."
