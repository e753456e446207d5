#!/usr/bin/env bash
# Prints the version of what is built from this checkout. cmd/canaryd/VERSION has the release's
# number. Only a clean checkout of its tag is the release, such as 0.1.0; every other one is a
# version before it, such as 0.1.0-dev+0123456789ab.dirty.
set -euo pipefail
cd "$(dirname "$0")/.."
release=$(<cmd/canaryd/VERSION)
if [ "$(git describe --tags --exact-match --match "v$release" --dirty 2>/dev/null)" = "v$release" ]; then
	echo "$release"
elif commit=$(git describe --always --abbrev=12 --exclude '*' --dirty=.dirty 2>/dev/null); then
	echo "$release-dev+$commit"
else
	echo "$release-dev"
fi
