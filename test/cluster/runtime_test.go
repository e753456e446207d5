//go:build cluster

package cluster

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// podImage is the image of the program in test/cluster/pod, which is also the pause of pods.
const podImage = "registry.example/pod:v1"

// startNode starts containerd, kubelet and kube-proxy, and waits for the node to be ready.
func startNode(n *node) {
	work := filepath.Dir(n.dir)
	n.file("cni/10-pods.conflist", cniConfig)
	n.start("containerd", "--config="+n.file("containerd.toml", fmt.Sprintf(containerdConfig, podImage, work+"/cni", n.dir+"/cni")))
	n.until("containerd", func() error {
		_, _, err := n.run("", "ctr", "version")
		return err
	})
	n.loadImages(work)
	n.start("kube-proxy", "--kubeconfig="+n.kubeconfig("system:kube-proxy"), "--hostname-override="+nodeName, "--proxy-mode=iptables",
		"--cluster-cidr="+podsIPv4+","+podsIPv6, "--conntrack-max-per-core=0", "--conntrack-min=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--v=2")
	started := time.Now()
	n.start("kubelet", "--config="+n.file("kubelet.yaml", kubeletConfig), "--kubeconfig="+n.kubeconfig("system:node:"+nodeName),
		"--hostname-override="+nodeName, "--node-ip="+nodeIPv4+","+nodeIPv6, "--root-dir=/var/lib/kubelet")
	n.until("the node to be registered", func() error {
		_, _, err := n.run("", "kubectl", "get", "node", nodeName)
		return err
	})
	n.want("kubectl", "wait", "--for=condition=Ready", "--timeout=180s", "node/"+nodeName)
	n.results.step("node Ready", time.Since(started))
}

// loadImages makes containerd load the image of canaryd, as make image-rootfs assembles it, and
// the image of the other pods.
func (n *node) loadImages(work string) {
	n.Helper()
	pod := filepath.Join(n.dir, "pod-root")
	n.must(os.Mkdir(pod, 0o755))
	program, err := os.ReadFile(filepath.Join(work, "programs", "pod"))
	n.must(err)
	n.must(os.WriteFile(filepath.Join(pod, "pod"), program, 0o755))
	n.load(pod, imageConfig{Entrypoint: []string{"/pod"}, Cmd: []string{"pause"}}, podImage)

	root, err := filepath.EvalSymlinks(filepath.Join(work, "rootfs"))
	n.must(err)
	// The update needs a second name.
	n.load(root, n.containerfile(), imageName+":v1", imageName+":v2")
}

// imageConfig is an image's configuration for its runs.
type imageConfig struct {
	Env, Entrypoint, Cmd []string
	User                 string
}

// containerfile returns that configuration from deploy/image/Containerfile.
func (n *node) containerfile() (c imageConfig) {
	n.Helper()
	text, err := os.ReadFile("../../deploy/image/Containerfile")
	n.must(err)
	_, last, _ := strings.Cut(string(text), "\nFROM scratch\n")
	for line := range strings.Lines(last) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "ENV":
			c.Env = append(c.Env, rest)
		case "USER":
			c.User = rest
		case "ENTRYPOINT":
			n.must(json.Unmarshal([]byte(rest), &c.Entrypoint))
		case "CMD":
			n.must(json.Unmarshal([]byte(rest), &c.Cmd))
		}
	}
	if len(c.Entrypoint) == 0 || len(c.Env) == 0 || c.User == "" {
		n.Fatalf("the Containerfile's last stage says %+v", c)
	}
	return c
}

// load makes an archive of a root file system, as docker save does, and makes containerd load
// it.
func (n *node) load(root string, config imageConfig, names ...string) {
	n.Helper()
	dir := filepath.Join(n.dir, "image-"+filepath.Base(root))
	n.must(os.Mkdir(dir, 0o755))
	layer := filepath.Join(dir, "layer.tar")
	n.want("tar", "-C", root, "--owner=0", "--group=0", "--numeric-owner", "-cf", layer, ".")
	bytes, err := os.ReadFile(layer)
	n.must(err)
	write := func(name string, value any) {
		text, err := json.Marshal(value)
		n.must(errors.Join(err, os.WriteFile(filepath.Join(dir, name), text, 0o600)))
	}
	write("config.json", map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(bytes))}},
	})
	write("manifest.json", []map[string]any{{"Config": "config.json", "RepoTags": names, "Layers": []string{"layer.tar"}}})
	archive := dir + ".tar"
	n.want("tar", "-C", dir, "-cf", archive, "manifest.json", "config.json", "layer.tar")
	n.want("ctr", "-n", "k8s.io", "images", "import", "--snapshotter", "native", archive)
}

// containerd writes only to the node's folders. The native snapshotter works on any file
// system. A process without SYS_RESOURCE may not raise the score of a container.
const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = %q
  conf_dir = %q
`

// cniConfig makes each pod a neighbour of the node, with rules of portmap for its host ports.
const cniConfig = `{
  "cniVersion": "0.4.0", "name": "pods",
  "plugins": [
    {"type": "ptp", "ipMasq": true, "ipam": {"type": "host-local",
      "ranges": [[{"subnet": "` + podsIPv4 + `"}], [{"subnet": "` + podsIPv6 + `"}]],
      "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
  ]
}
`

// kubeletConfig has no evictions: the machine's disk may be nearly full.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
failCgroupV1: false
failSwapOn: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
volumePluginDir: /var/lib/kubelet/volume-plugins
`
