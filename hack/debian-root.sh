#!/usr/bin/env bash
# Unpacks what the image is made of for one architecture, next to the system: Debian's packages
# iptables, ipset and netbase with all that they depend on, of the release that this machine runs.
# Nothing of them is executed, so that an image for arm64 can be assembled on amd64.
# apt has folders of its own for it: this machine's list of architectures stays as it is.
# hack/debian-root.sh ARCHITECTURE FOLDER
set -euo pipefail
umask 022
[ $# -eq 2 ] || { echo 'usage: hack/debian-root.sh ARCHITECTURE FOLDER' >&2; exit 2; }
arch=$1 root=$2
packages=(iptables ipset netbase)

command -v apt-get >/dev/null || { echo 'debian-root: there is no apt-get here' >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/state/lists/partial "$work"/cache/archives/partial
touch "$work/status"
cat >"$work/apt.conf" <<END
APT::Architecture "$arch";
APT::Architectures "$arch";
Dir::State "$work/state";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
END
# The user _apt cannot read a folder of mktemp's.
chmod 755 "$work"
apt() { APT_CONFIG=$work/apt.conf apt-get -q -y "$@" >>"$work/log" 2>&1; }
if ! apt update || ! apt install --download-only --no-install-recommends "${packages[@]}"; then
	tail -n 20 "$work/log" >&2
	echo "debian-root: apt has no ${packages[*]} for $arch. Ubuntu has them on another host than those for amd64." >&2
	exit 1
fi

mkdir -p "$(dirname "$root")"
mkdir "$root"
root=$(realpath "$root")
# As Debian has it since release 12; without these links a library has two places.
mkdir -p "$root"/usr/{lib,lib64,bin,sbin} "$root/var/lib/dpkg/info"
for folder in lib lib64 bin sbin; do ln -s "usr/$folder" "$root/$folder"; done
for package in "$work"/cache/archives/*.deb; do
	name=$(dpkg-deb -f "$package" Package)
	dpkg-deb --fsys-tarfile "$package" | tar -x --no-same-owner --keep-directory-symlink -C "$root"
	# What dpkg would write, for those who ask it which package a file is of.
	dpkg-deb --fsys-tarfile "$package" | tar -t | sed 's|^\.||; s|/$||; s|^$|/.|' >"$root/var/lib/dpkg/info/$name.list"
	dpkg-deb -f "$package" | sed '1a Status: install ok installed' >>"$root/var/lib/dpkg/status"
	echo >>"$root/var/lib/dpkg/status"
done
# A link to an absolute path would lead into this machine's system.
find "$root" -type l -lname '/*' | while read -r link; do ln -sfnr "$root$(readlink "$link")" "$link"; done
