#!/usr/bin/env bash
# Assembles the image's root file system in a new folder: canaryd, the files of
# deploy/image/files and the libraries that they need, from the Debian that this
# runs on, or from the one that hack/debian-root.sh has unpacked: then nothing of it is
# executed, so it may be another architecture's. The Containerfile and the tests run it, too.
# BACKENDS=nft leaves iptables out, which only legacy and declared rules need.
# hack/image-rootfs.sh CANARYD FOLDER [DEBIAN-ROOT]
set -euo pipefail
umask 022
[ $# -eq 2 ] || [ $# -eq 3 ] || { echo 'usage: hack/image-rootfs.sh CANARYD FOLDER [DEBIAN-ROOT]' >&2; exit 2; }
canaryd=$1 root=$2 from=${3:+$(realpath "$3")}
backends=${BACKENDS:-nft legacy}
[ "$backends" = nft ] || [ "$backends" = 'nft legacy' ] || { echo "image-rootfs: BACKENDS=$backends: want nft or 'nft legacy'" >&2; exit 2; }
list=$(dirname "$0")/../deploy/image/files

mkdir -p "$(dirname "$root")"
mkdir "$root" # a file of an earlier run would be in the image, too

# What is listed, with what links lead to.
files=()
while read -r pattern; do
	[[ $pattern == /* ]] || continue
	[[ $backends != nft || $pattern != *tables* ]] || continue
	mapfile -t found < <(compgen -G "$from$pattern")
	[ ${#found[@]} -gt 0 ] || { echo "image-rootfs: $pattern is not here: install Debian's packages iptables, ipset and netbase" >&2; exit 1; }
	files+=("${found[@]#"$from"}")
done <"$list"

# needed prints what programs and libraries of another root need: readelf says
# "(NEEDED) Shared library: [NAME]" and "[Requesting program interpreter: PATH]".
needed() {
	local -A seen=()
	local queue=("$@") names name path
	while [ ${#queue[@]} -gt 0 ]; do
		mapfile -t names < <(readelf -ld -- "${queue[@]/#/$from}" |
			sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p; s/.*program interpreter: \(.*\)\]/\1/p' | sort -u)
		queue=()
		for name in "${names[@]}"; do
			# The loader is known by the path that programs ask for.
			[[ $name != ld-linux* && -z ${seen[$name]:-} ]] || continue
			seen[$name]=yes
			path=$name
			[[ $path == /* ]] || path=$(cd "$from/" && compgen -G "usr/lib/*/$name" | sed 's|^usr||' || true)
			# cp complains of what is not there.
			echo "${path:-/lib/$name}"
			[ ! -e "$from$path" ] || queue+=("$path")
		done
	done
}

# ldd prints "NAME => PATH (ADDRESS)", and the loader as "PATH (ADDRESS)".
mapfile -t libraries < <(
	programs=()
	for file in "${files[@]}"; do [[ $file == /etc/* ]] || programs+=("$file"); done
	if [ -n "$from" ]; then
		needed "${programs[@]}" | sort -u
	else
		ldd "$(realpath "$canaryd")" "${programs[@]}" | sed -n 's/.*[[:space:]]\(\/[^ ]*\) (0x.*/\1/p' | sort -u
	fi
)
[ ${#libraries[@]} -gt 0 ] || { echo 'image-rootfs: no library was found' >&2; exit 1; }

# iptables' links lead to files beside them; of libraries only the name that is
# asked for is needed.
to=$(realpath "$root")
(cd "$from/" && cp -P --parents --preserve=mode "${files[@]#/}" "$to")
(cd "$from/" && cp -L --parents --preserve=mode "${libraries[@]#/}" "$to")
install -D -m 0755 "$canaryd" "$root/usr/bin/canaryd"
dangling=$(find "$root" -xtype l)
[ -z "$dangling" ] || { echo "image-rootfs: these lead nowhere: $dangling" >&2; exit 1; }

# Scanners read here which packages the files are of, and lawyers their terms.
# dpkg knows some as /lib/... that are in /usr/lib/..., and fails for the names that
# it does not know.
dpkg=(dpkg-query "--admindir=$from/var/lib/dpkg")
mapfile -t packages < <(
	for file in "${files[@]}" "${libraries[@]}"; do
		real=$(readlink -f "$from$file")
		real=${real#"$from"}
		printf '%s\n' "$file" "$real" "${real#/usr}"
	done | sort -u | xargs "${dpkg[@]}" -S 2>/dev/null | sed 's/: .*//' | sort -u
)
[ ${#packages[@]} -gt 0 ] || { echo 'image-rootfs: dpkg knows none of the files' >&2; exit 1; }
install -d "$root/var/lib/dpkg/status.d"
for package in "${packages[@]}"; do
	name=${package%%:*} doc=/usr/share/doc/${package%%:*}/copyright
	"${dpkg[@]}" -s "$package" >"$root/var/lib/dpkg/status.d/$name"
	[ ! -e "$from$doc" ] || install -D -m 0644 "$from$doc" "$root$doc"
done

# Where something is mounted: the image itself is never written to.
install -d -m 0755 "$root"/{dev,proc,sys,run/canaryd,var/lib/canaryd,lib/modules}
install -d -m 1777 "$root/tmp"
