//go:build cluster

package cluster

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"path/filepath"
	"strings"
)

const (
	nodeName = "node"
	api      = "https://127.0.0.1:6443"
)

// users are the users of the node's programs, with their groups. A name is also a token.
var users = map[string]string{
	"admin":                          "system:masters",
	"system:kube-controller-manager": "",
	"system:kube-scheduler":          "",
	"system:kube-proxy":              "",
	"system:node:" + nodeName:        "system:nodes",
}

// startControlPlane starts etcd, the API server, the controllers and the scheduler.
func startControlPlane(n *node) {
	var tokens strings.Builder
	for user, groups := range users {
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", user, user, user, groups)
	}
	key := n.signingKey()
	n.file("admin.kubeconfig", kubeconfig("admin"))
	n.start("etcd", "--data-dir="+filepath.Join(n.dir, "etcd"))
	n.start("kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379", "--advertise-address="+nodeIPv4, "--cert-dir="+filepath.Join(n.dir, "apiserver"),
		"--token-auth-file="+n.file("tokens", tokens.String()), "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+key, "--service-account-signing-key-file="+key,
		"--service-cluster-ip-range="+servicesIPv4+","+servicesIPv6, "--allow-privileged=true",
		"--kubelet-preferred-address-types=InternalIP")
	ready := n.until("the API server", func() error {
		_, _, err := n.run("", "kubectl", "get", "--raw=/readyz")
		return err
	})
	n.start("kube-controller-manager", "--kubeconfig="+n.kubeconfig("system:kube-controller-manager"), "--leader-elect=false",
		"--service-account-private-key-file="+key, "--use-service-account-credentials=true")
	n.start("kube-scheduler", "--kubeconfig="+n.kubeconfig("system:kube-scheduler"), "--leader-elect=false")
	n.until("the first controllers", func() error {
		_, _, err := n.run("", "kubectl", "-n", "default", "get", "serviceaccount", "default")
		return err
	})
	n.results.step("API server ready", ready)
	n.versions()
}

// signingKey writes the key that signs service accounts' tokens.
func (n *node) signingKey() string {
	n.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	n.must(err)
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}
	return n.file("service-accounts.key", string(pem.EncodeToMemory(block)))
}

// kubeconfig writes a user's file for access to the API server, and returns its path.
func (n *node) kubeconfig(user string) string {
	n.Helper()
	return n.file(strings.ReplaceAll(user, ":", "-")+".kubeconfig", kubeconfig(user))
}

func kubeconfig(user string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: it
contexts: [{name: it, context: {cluster: it, user: it}}]
clusters: [{name: it, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: it, user: {token: %q}}]
`, api, user)
}

// versions notes the versions of the node's programs.
func (n *node) versions() {
	n.Helper()
	first := func(name string, args ...string) string {
		line, _, _ := strings.Cut(n.want(name, args...), "\n")
		return strings.TrimSpace(line)
	}
	word := func(i int, line string) string {
		words := strings.Fields(line)
		if len(words) <= i {
			n.Fatalf("no version in %q", line)
		}
		return words[i]
	}
	release, _, _ := strings.Cut(first("uname", "-r"), "-") // without its builder's suffix
	n.results.versions = []string{
		"Kubernetes " + strings.TrimPrefix(word(1, first("kubelet", "--version")), "v"),
		"etcd " + word(2, first("etcd", "--version")),
		"containerd " + word(2, first("containerd", "--version")),
		"runc " + word(2, first("runc", "--version")),
		"Linux " + release,
		"iptables " + strings.TrimPrefix(word(1, first("iptables", "--version")), "v"),
		"nft " + strings.TrimPrefix(word(1, first("nft", "--version")), "v"),
	}
}
