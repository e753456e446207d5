#!/usr/bin/env bash
# Builds programs of Kubernetes, of the version that test/kubeproxy/program/go.mod names, and
# prints the folder that has them. What was built is kept until that version changes.
# hack/kubernetes.sh PROGRAM...
set -euo pipefail
[ $# -gt 0 ] || { echo 'usage: hack/kubernetes.sh PROGRAM...' >&2; exit 2; }
cd "$(dirname "$0")/.."

module=test/kubeproxy/program
version=$(cd $module && go list -m -f '{{.Version}}' k8s.io/kubernetes)
cache=/var/cache/canaryd-test
[ -w /var/cache ] || cache=$PWD/bin
# The kernel calls a process by its file, and canaryd knows kube-proxy by that.
built=$cache/kubernetes/$version

missing=()
for program; do [ -x "$built/$program" ] || missing+=("$program"); done
if [ ${#missing[@]} -gt 0 ]; then
	echo "kubernetes: building ${missing[*]} $version; the first time that takes minutes" >&2
	new=$(mktemp -d)
	trap 'rm -rf "$new"' EXIT
	# A build by another version of Go is no other program.
	(cd $module && CGO_ENABLED=0 go build -o "$new/" \
		-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" "${missing[@]/#/k8s.io/kubernetes/cmd/}")
	mkdir -p "$built"
	# A program is either not there or whole, even if two of these scripts run at once.
	for program in "${missing[@]}"; do
		cp "$new/$program" "$built/.$program.$$" && mv "$built/.$program.$$" "$built/$program"
	done
fi
echo "$built"
