#!/usr/bin/env bash
# Runs test/kubeproxy with a real kube-proxy, which hack/kubernetes.sh builds. Arguments go to
# go test: more than an hour needs -timeout.
set -euo pipefail
cd "$(dirname "$0")/.."
built=$(hack/kubernetes.sh kube-proxy)

# The rows mostly wait, so all of them run at once.
CANARYD_TEST_KUBE_PROXY=$built/kube-proxy go test -count=1 -timeout=1h -parallel=6 -v ./test/kubeproxy "$@"
