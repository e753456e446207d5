#!/usr/bin/env bash
# Assembles the image's root file system in a new folder: canaryd, the files of
# deploy/image/files and the libraries that they need, from the Debian that this
# runs on. The Containerfile and the tests run it, too.
# hack/image-rootfs.sh CANARYD FOLDER
set -euo pipefail
umask 022
[ $# -eq 2 ] || { echo 'usage: hack/image-rootfs.sh CANARYD FOLDER' >&2; exit 2; }
canaryd=$1 root=$2
list=$(dirname "$0")/../deploy/image/files

mkdir -p "$(dirname "$root")"
mkdir "$root" # a file of an earlier run would be in the image, too

# What is listed, with what links lead to.
files=()
while read -r pattern; do
	[[ $pattern == /* ]] || continue
	mapfile -t found < <(compgen -G "$pattern")
	[ ${#found[@]} -gt 0 ] || { echo "image-rootfs: $pattern is not here: install Debian's packages iptables, ipset and netbase" >&2; exit 1; }
	files+=("${found[@]}")
done <"$list"

# ldd prints "NAME => PATH (ADDRESS)", and the loader as "PATH (ADDRESS)".
mapfile -t libraries < <(
	for file in "$(realpath "$canaryd")" "${files[@]}"; do [[ $file == /etc/* ]] || echo "$file"; done |
		xargs ldd | sed -n 's/.*[[:space:]]\(\/[^ ]*\) (0x.*/\1/p' | sort -u
)
[ ${#libraries[@]} -gt 0 ] || { echo 'image-rootfs: ldd found no library' >&2; exit 1; }

# iptables' links lead to files beside them; of libraries only the name that is
# asked for is needed.
to=$(realpath "$root")
(cd / && cp -P --parents --preserve=mode "${files[@]#/}" "$to")
(cd / && cp -L --parents --preserve=mode "${libraries[@]#/}" "$to")
install -D -m 0755 "$canaryd" "$root/usr/bin/canaryd"
dangling=$(find "$root" -xtype l)
[ -z "$dangling" ] || { echo "image-rootfs: these lead nowhere: $dangling" >&2; exit 1; }

# Scanners read here which packages the files are of, and lawyers their terms.
# dpkg knows some as /lib/... that are in /usr/lib/..., and fails for the names that
# it does not know.
mapfile -t packages < <(
	for file in "${files[@]}" "${libraries[@]}"; do
		real=$(readlink -f "$file")
		printf '%s\n' "$file" "$real" "${real#/usr}"
	done | sort -u | xargs dpkg-query -S 2>/dev/null | sed 's/: .*//' | sort -u
)
[ ${#packages[@]} -gt 0 ] || { echo 'image-rootfs: dpkg knows none of the files' >&2; exit 1; }
install -d "$root/var/lib/dpkg/status.d"
for package in "${packages[@]}"; do
	name=${package%%:*} doc=/usr/share/doc/${package%%:*}/copyright
	dpkg-query -s "$package" >"$root/var/lib/dpkg/status.d/$name"
	[ ! -e "$doc" ] || install -D -m 0644 "$doc" "$root$doc"
done

# Where something is mounted: the image itself is never written to.
install -d -m 0755 "$root"/{dev,proc,sys,run/canaryd,var/lib/canaryd,lib/modules}
install -d -m 1777 "$root/tmp"
