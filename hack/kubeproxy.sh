#!/usr/bin/env bash
# Runs test/kubeproxy with a real kube-proxy, which hack/kubernetes.sh builds. Arguments go to
# go test.
set -euo pipefail
cd "$(dirname "$0")/.."
built=$(hack/kubernetes.sh kube-proxy)

timeout=1h
[ -z "${CANARYD_KUBEPROXY:-}" ] || timeout=0 # KUBEPROXY says for how long
# The rows mostly wait, so all of them run at once.
CANARYD_TEST_KUBE_PROXY=$built/kube-proxy go test -count=1 -timeout="$timeout" -parallel=6 -v ./test/kubeproxy "$@"
