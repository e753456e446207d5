#!/usr/bin/env bash
# Prints what dpkg and rpm take for a version, of what git describe says: it
# begins with a digit and has no hyphen, and a commit comes before every release.
set -euo pipefail
[ $# -eq 1 ] || { echo 'usage: hack/package-version.sh VERSION' >&2; exit 2; }
version=${1#v}
case $version in
[0-9]*) ;;
*) version="0~$version" ;;
esac
echo "${version//-/+}"
