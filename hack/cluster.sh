#!/usr/bin/env bash
# Runs test/cluster: a node of Kubernetes with canaryd as its DaemonSet, once with each backend.
# The node has namespaces and a control group of its own, and all of it ends with this script.
# What is built and unpacked for it is kept below /var/cache/canaryd-test. Arguments go to the tests.
# CLUSTER_BACKENDS=nft chooses a backend; with CLUSTER_KEEP=1 the node's files are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
. hack/unpack.sh

fail() { echo "cluster: $1" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || fail "the node needs the machine's root."

# make_groups makes a folder in each hierarchy of control groups, which is the root of what the
# node sees of it. $leaf is where the node's first processes belong: version 2 has none in a group
# that limits others.
make_groups() {
	local controllers path top group
	groups=() leaf=
	if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
		group=/sys/fs/cgroup/canaryd-cluster.$$
		# Those that this machine's other groups have not asked for are switched on as well.
		for controllers in cpu cpuset memory pids; do echo "+$controllers" >/sys/fs/cgroup/cgroup.subtree_control; done
		mkdir -p "$group/init"
		groups=("$group") leaf=$group/init
		return
	fi
	while IFS=: read -r _ controllers path; do
		[ -n "$controllers" ] || continue
		top=/sys/fs/cgroup/${controllers#name=}
		[ ! -d "$top$path" ] || top=${top}${path%/}
		group=$top/canaryd-cluster.$$
		mkdir "$group"
		groups+=("$group")
		# A new group of this hierarchy has neither processors nor memory.
		[ ! -e "$group/cpuset.cpus" ] || { cat "$top/cpuset.cpus" >"$group/cpuset.cpus" && cat "$top/cpuset.mems" >"$group/cpuset.mems"; }
	done </proc/self/cgroup
	[ ${#groups[@]} -gt 0 ] || fail "there are no control groups here."
}

# remove_groups waits for processes that are being killed.
remove_groups() {
	local group i
	for group in "${groups[@]}"; do
		for i in $(seq 50); do
			[ -d "$group" ] || break
			find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
		done
		[ ! -d "$group" ] || echo "cluster: $group could not be removed" >&2
	done
	groups=()
}

# etcd and containerd write hundreds of MiB, for which /tmp in memory may have no room.
# A run that was killed with SIGKILL left its folder.
find /var/tmp -maxdepth 1 -name 'canaryd-cluster.*' -mtime +1 -exec rm -rf {} +
work=$(mktemp -d /var/tmp/canaryd-cluster.XXXXXX)
groups=() node=
clean_up() {
	# The first process of a pid namespace takes all others with it, and they their mounts.
	[ -z "$node" ] || { kill -KILL "$node" && wait "$node"; } 2>/dev/null || true
	node=
	remove_groups
	if [ "${CLUSTER_KEEP:-}" ]; then echo "cluster: the node's files are in $work"; else rm -rf "$work"; fi
}
trap clean_up EXIT
trap 'exit 130' HUP INT TERM

# Debian's packages of one suite, so that each machine runs the same.
packages=(etcd-server containerd runc containernetworking-plugins)
parts=/var/cache/canaryd-test/cluster
done_so="1: bookworm ${packages[*]}"
if [ "$(cat $parts/.unpacked 2>/dev/null)" != "$done_so" ]; then
	lack=$(what_lacks)
	[ -z "$lack" ] || fail "$lack"
	echo "cluster: unpacking ${packages[*]} into $parts"
	{ suite bookworm "$(dpkg --print-architecture)" && unpack_alone "$work/parts" "${packages[@]}"; } >"$work/log" 2>&1 ||
		{ tail -n 20 "$work/log" >&2; fail "unpacking failed, see above."; }
	rm -rf $parts && mkdir -p $parts && cp -a "$work/parts/." $parts/
	echo "$done_so" >$parts/.unpacked
fi
kubernetes=$(hack/kubernetes.sh kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)

# The operator's definitions come with its module; test/kubernetes names the version.
operator=github.com/prometheus-operator/prometheus-operator
version=$(cd test/kubernetes && go list -m -f '{{.Version}}' $operator/pkg/apis/monitoring)
module=$(cd / && go mod download -json "$operator@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
[ -d "$module/example/prometheus-operator-crd" ] || fail "$operator@$version has no definitions."

mkdir "$work/programs"
make -s image-rootfs
make -s plugin
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$work/programs/pod" ./test/cluster/pod
go test -c -tags cluster -o "$work/programs/cluster.test" ./test/cluster
shopt -s nullglob
ln -s "$PWD/bin/canaryd" "$PWD/bin/kubectl-canaryd" "$kubernetes"/kube* $parts/usr/bin/* "$work/programs/"
ln -s "$parts/usr/lib/cni" "$work/cni"
ln -s "$PWD/bin/rootfs" "$work/rootfs"
ln -s "$module/example/prometheus-operator-crd" "$work/definitions"
# kustomize takes folders by relative paths only.
cp -r deploy/kubernetes "$work/deploy"

spaces() { for kind in cgroup ipc mnt net pid uts; do readlink /proc/self/ns/$kind; done | tr '\n' ' '; }

status=0
for backend in ${CLUSTER_BACKENDS:-nft legacy}; do
	make_groups
	mkdir "$work/$backend"
	(
		for group in "${groups[@]}"; do echo $BASHPID >"$group/cgroup.procs"; done
		export CANARYD_TEST_CLUSTER=$work CANARYD_TEST_CLUSTER_BACKEND=$backend CANARYD_TEST_CLUSTER_OUTSIDE="$(spaces)"
		cd test/cluster
		# The shell in the middle stays the first process: it reaps what other processes leave.
		exec unshare --cgroup bash -c '[ -z "$0" ] || echo $$ >"$0/cgroup.procs"; exec "$@"' "$leaf" \
			unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc bash -c '"$@"; exit $?' node \
			"$work/programs/cluster.test" -test.count=1 -test.timeout=1h -test.v "$@"
	) &
	node=$!
	wait $node || status=$?
	node=
	remove_groups
done
exit $status
