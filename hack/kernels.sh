#!/usr/bin/env bash
# Unpacks the kernels that test/kernels boots, and the userlands of their suites. A kernel is
# Debian's for virtual machines of one suite: its image, the modules that networks need, and kmod
# to load them, next to the system below /var/cache/canaryd-test/kernels. What is unpacked is
# kept, and sid's for a week. What cannot be had is named, and its tests are skipped; with CI=true
# that is a failure.
# hack/kernels.sh SUITE-ARCHITECTURE...
set -euo pipefail
cd "$(dirname "$0")/.."
. hack/unpack.sh
[ $# -gt 0 ] || { echo 'usage: hack/kernels.sh SUITE-ARCHITECTURE...' >&2; exit 2; }

kernels=/var/cache/canaryd-test/kernels
for kernel; do
	if [ "${kernel##*-}" = amd64 ]; then hack/userlands.sh; else hack/userlands.sh "${kernel##*-}" "${kernel%-*}"; fi
done
done_so="1: net crypto lib, kmod"

give_up() {
	echo "kernels: $1" >&2
	[ "${CI:-}" != true ] || exit 1
	echo "kernels: without them test/kernels is skipped." >&2
	exit 0
}

unpacked() { # KERNEL
	local stamp=$kernels/$1/.unpacked
	[ "$(cat "$stamp" 2>/dev/null)" = "$done_so" ] || return
	[[ $1 != sid* ]] || [ -z "$(find "$stamp" -mtime +6)" ]
}

# unpack leaves the file vmlinuz, and in root what the kernel adds to the suite's userland.
unpack() { # SUITE ARCHITECTURE KERNEL
	local new=$work/new packages modules version to folder
	mkdir -p "$new"/root/usr/{bin,sbin,lib}
	suite "$1" "$2" && unpack_with "$work/kmod" kmod || return
	# The meta package needs the image, which in newer suites is one of several packages.
	mapfile -t packages < <(apt_of cache depends --recurse --no-recommends --no-suggests --no-enhances \
		--no-conflicts --no-breaks --no-replaces "linux-image-cloud-$2" |
		grep -E '^linux-(image|binary|modules|base)-[0-9]')
	[ ${#packages[@]} -gt 0 ] && unpack_alone "$work/kernel" "${packages[@]}" || return
	modules=$(find "$work/kernel" -path '*/lib/modules/*/kernel' -prune -print -quit)
	version=$(basename "$(dirname "$modules")") to=$new/root/usr/lib/modules/$version
	cp "$(find "$work/kernel" -name 'vmlinuz*' -type f -print -quit)" "$new/vmlinuz" || return
	mkdir -p "$to/kernel"
	cp "$modules"/../modules.{builtin,builtin.modinfo,order} "$to" || return
	for folder in net crypto lib; do cp -a "$modules/$folder" "$to/kernel" || return; done
	rm -rf "$to"/kernel/net/{wireless,mac80211,bluetooth,sunrpc,ceph,9p}
	# kmod, and of what it needs the libraries that no userland has.
	cp -a "$work/kmod/usr/bin/kmod" "$new/root/usr/bin" || return
	ln -s ../bin/kmod "$new/root/usr/sbin/modprobe"
	(cd "$work/kmod" && find usr/lib -name 'libkmod.so*' -o -name 'liblzma.so*' -o -name 'libzstd.so*' \
		-o -name 'libcrypto.so*' | tar -c -T - | tar -x -C "$new/root") || return
	depmod "$1" "$new/root" "$version" || return
	mkdir -p $kernels && rm -rf "${kernels:?}/$3" && mv "$new" "$kernels/$3" || return
	echo "$done_so" >"$kernels/$3/.unpacked"
}

# depmod lists which module needs which others. It is a program of the suite's for this machine,
# whichever machine the modules are for.
depmod() { # SUITE ROOT VERSION
	local arch tools=$work/tools
	arch=$(dpkg --print-architecture)
	suite "$1" "$arch" && unpack_with "$tools" kmod || return
	ln -s usr/lib "$2/lib"
	ln -sf ../bin/kmod "$tools/usr/sbin/depmod"
	local libraries
	libraries=$(dirname "$(find "$tools/usr/lib" -name 'libc.so.6')")
	"$(find "$libraries" -name 'ld-linux*')" --library-path "$libraries" "$tools/usr/sbin/depmod" -b "$2" "$3" || return
	rm "$2/lib"
}

missing=()
for kernel; do unpacked "$kernel" || missing+=("$kernel"); done
if [ ${#missing[@]} -gt 0 ]; then
	lack=$(what_lacks)
	[ -z "$lack" ] || give_up "$lack"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

lacking=()
for kernel in "${missing[@]}"; do
	echo "kernels: unpacking the kernel of $kernel into $kernels/$kernel"
	unpack "${kernel%-*}" "${kernel##*-}" "$kernel" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2 && lacking+=("$kernel"); }
	rm -rf "${work:?}"/*/
done
[ ${#lacking[@]} -eq 0 ] || give_up "cannot be had: ${lacking[*]}."
