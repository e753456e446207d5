// The flanneld that test/flushers runs: flannel's package that writes its rules. A module of its own.
module github.com/canaryd/canaryd/test/owners/program

go 1.26.0

require github.com/flannel-io/flannel v0.28.10

require (
	github.com/coreos/go-iptables v0.8.0 // indirect
	github.com/go-logr/logr v1.4.4 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/sys v0.48.0 // indirect
	k8s.io/klog/v2 v2.140.0 // indirect
	sigs.k8s.io/knftables v0.0.18 // indirect
)
