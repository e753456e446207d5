#!/usr/bin/env bash
# Makes a package for rpm of what make install DESTDIR=TREE PREFIX=/usr installed:
# hack/rpm.sh TREE VERSION ARCHITECTURE FILE.rpm
set -euo pipefail
[ $# -eq 4 ] || { echo 'usage: hack/rpm.sh TREE VERSION ARCHITECTURE FILE.rpm' >&2; exit 2; }
tree=$(realpath "$1") arch=$3 package=$4
here=$(dirname "$0")
version=${2//-/\~} # 0.1.0~dev comes before 0.1.0

# rpm has names of its own for what Go calls GOARCH.
case $arch in
amd64) arch=x86_64 ;;
arm64) arch=aarch64 ;;
386) arch=i686 ;;
arm) arch=armv7hl ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! rpmbuild -bb --target "$arch-linux" --define "_topdir $work" --define "_rpmfilename canaryd.rpm" \
	--define "canaryd_version $version" --define "canaryd_tree $tree" "$here/../deploy/rpm/canaryd.spec" >"$work/log" 2>&1; then
	cat "$work/log" >&2
	exit 1
fi
mv "$work/RPMS/canaryd.rpm" "$package"
