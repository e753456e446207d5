#!/usr/bin/env bash
# Makes everything that a release has, in a new folder: docs/release.md lists it. The same sources,
# the same Go and the same packages of Debian's give the same bytes, on whichever machine and in
# whichever folder.
# hack/release.sh FOLDER VERSION COMMIT SECONDS [REPOSITORY]
# SECONDS since 1970 are the age of all files; REPOSITORY is where the image will be pulled from.
# With CANARYD_DEBIAN_ROOTS it takes what hack/debian-root.sh has unpacked there, and downloads
# nothing.
set -euo pipefail
[ $# -eq 4 ] || [ $# -eq 5 ] || { echo 'usage: hack/release.sh FOLDER VERSION COMMIT SECONDS [REPOSITORY]' >&2; exit 2; }
version=$2 commit=$3 epoch=$4 repository=${5:-}
mkdir -p "$(dirname "$1")"
mkdir "$1" # a file of an earlier release would be summed up, too
out=$(realpath "$1")
cd "$(dirname "$0")/.."

for program in dpkg-deb rpmbuild readelf; do
	command -v $program >/dev/null || { echo "release: there is no $program (Debian: dpkg, rpm, binutils)" >&2; exit 1; }
done
# Of what the operator's environment says only where Go keeps things may matter.
umask 022
export SOURCE_DATE_EPOCH=$epoch LC_ALL=C TZ=UTC
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOEXPERIMENT='' GOAMD64=v1 GOARM64=v8.0 GOFIPS140=off GOWORK=off

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
make -s completion BIN="$work"
for arch in amd64 arm64; do
	mkdir "$work/$arch"
	cp -r "$work/completion" "$work/$arch"
	name=canaryd_${version}_$arch
	GOOS=linux GOARCH=$arch make -s -o completion install BIN="$work/$arch" DESTDIR="$work/$arch/tree" PREFIX=/usr VERSION="$version" COMMIT="$commit"
	install -m 0755 "$work/$arch/canaryd" "$out/canaryd_${version}_linux_$arch"
	GOOS=linux GOARCH=$arch make -s plugin BIN="$work/$arch" VERSION="$version" COMMIT="$commit"
	install -m 0755 "$work/$arch/kubectl-canaryd" "$out/kubectl-canaryd_${version}_linux_$arch"
	hack/rpm.sh "$work/$arch/tree" "$version" $arch "$out/$name.rpm"
	hack/deb.sh "$work/$arch/tree" "$version" $arch "$out/$name.deb"
	roots=${CANARYD_DEBIAN_ROOTS:-$work/debian}
	[ -d "$roots/$arch" ] || hack/debian-root.sh $arch "$roots/$arch"
	hack/image-rootfs.sh "$work/$arch/canaryd" "$work/$arch/rootfs" "$roots/$arch"
done
go build -C hack/release -o "$work/release" .
"$work/release" -root . -work "$work" -out "$out" -version "$version" -commit "$commit" -epoch "$epoch" -repository "$repository"
