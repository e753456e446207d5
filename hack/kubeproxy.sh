#!/usr/bin/env bash
# Builds the kube-proxy of test/kubeproxy/program/go.mod into bin/kubeproxy, and runs
# test/kubeproxy with it. What was built is kept until that version changes. Arguments go
# to go test.
set -euo pipefail
cd "$(dirname "$0")/.."

module=test/kubeproxy/program
version=$(cd $module && go list -m -f '{{.Version}}' k8s.io/kubernetes)
# The kernel calls a process by its file, and canaryd knows kube-proxy by that.
built=$PWD/bin/kubeproxy/$version/kube-proxy

if [ ! -x "$built" ]; then
	echo "kubeproxy: building kube-proxy $version; the first time that takes some minutes"
	# A build by another version of Go is no other kube-proxy.
	(cd $module && CGO_ENABLED=0 go build -o "$built" \
		-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" k8s.io/kubernetes/cmd/kube-proxy)
fi

# The rows mostly wait, so all of them run at once.
CANARYD_TEST_KUBE_PROXY=$built go test -count=1 -timeout=0 -parallel=6 -v ./test/kubeproxy "$@"
