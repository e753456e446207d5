#!/usr/bin/env bash
# Makes a Debian package of what make install DESTDIR=TREE PREFIX=/usr installed:
# hack/deb.sh TREE VERSION ARCHITECTURE FILE.deb
set -euo pipefail
[ $# -eq 4 ] || { echo 'usage: hack/deb.sh TREE VERSION ARCHITECTURE FILE.deb' >&2; exit 2; }
tree=$1 arch=$3 package=$4
sources=$(dirname "$0")/../deploy/deb
version=${2//-/\~} # 0.1.0~dev comes before 0.1.0

install -d -m 0755 "$tree/DEBIAN"
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" "$sources/control" >"$tree/DEBIAN/control"
# No conffile: dpkg would stop to ask about a file that the operator wrote before the installation.
install -D -m 0644 "$tree/etc/default/canaryd" "$tree/usr/share/canaryd/canaryd.default"
rm -r "$tree/etc"
install -m 0755 "$sources/postinst" "$sources/prerm" "$sources/postrm" "$tree/DEBIAN"
find "$tree" -type d -exec chmod 0755 {} +
# gzip: it takes three seconds where xz takes ten, for a quarter more; -z9 takes nine for 0.4 % less.
dpkg-deb -Zgzip -z6 --root-owner-group --build "$tree" "$package" >/dev/null
