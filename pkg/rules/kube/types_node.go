package kube

// A Node is a v1 Node.
type Node struct {
	TypeMeta
	ObjectMeta `json:"metadata"`
	Spec       NodeSpec   `json:"spec"`
	Status     NodeStatus `json:"status"`
}

// NodeSpec is the wanted state of a node.
type NodeSpec struct {
	PodCIDR             string                   `json:"podCIDR,omitempty"`
	PodCIDRs            []string                 `json:"podCIDRs,omitempty"`
	ProviderID          string                   `json:"providerID,omitempty"`
	Unschedulable       bool                     `json:"unschedulable,omitempty"`
	Taints              []Taint                  `json:"taints,omitempty"`
	ConfigSource        *NodeConfigSource        `json:"configSource,omitempty"`
	ExternalID          string                   `json:"externalID,omitempty"`
	PodPreemptionPolicy *NodePodPreemptionPolicy `json:"podPreemptionPolicy,omitempty"`
}

// A Taint keeps pods away.
type Taint struct {
	Key       string `json:"key"`
	Value     string `json:"value,omitempty"`
	Effect    string `json:"effect"`
	TimeAdded Time   `json:"timeAdded,omitempty"`
}

// A NodeConfigSource is the source of an older kubelet's configuration.
type NodeConfigSource struct {
	ConfigMap *ConfigMapNodeConfigSource `json:"configMap,omitempty"`
}

// A ConfigMapNodeConfigSource names a ConfigMap.
type ConfigMapNodeConfigSource struct {
	Namespace        string `json:"namespace"`
	Name             string `json:"name"`
	UID              string `json:"uid,omitempty"`
	ResourceVersion  string `json:"resourceVersion,omitempty"`
	KubeletConfigKey string `json:"kubeletConfigKey"`
}

// A NodePodPreemptionPolicy lists the requesters for which the node preempts no pod.
type NodePodPreemptionPolicy struct {
	DisableResizePreemption []string `json:"disableResizePreemption,omitempty"`
}

// NodeStatus is the actual state of a node. Rules depend on its addresses.
type NodeStatus struct {
	Capacity         map[string]Quantity  `json:"capacity,omitempty"`
	Allocatable      map[string]Quantity  `json:"allocatable,omitempty"`
	Phase            string               `json:"phase,omitempty"`
	Conditions       []NodeCondition      `json:"conditions,omitempty"`
	Addresses        []NodeAddress        `json:"addresses,omitempty"`
	DaemonEndpoints  NodeDaemonEndpoints  `json:"daemonEndpoints"`
	NodeInfo         NodeSystemInfo       `json:"nodeInfo"`
	Images           []ContainerImage     `json:"images,omitempty"`
	VolumesInUse     []string             `json:"volumesInUse,omitempty"`
	VolumesAttached  []AttachedVolume     `json:"volumesAttached,omitempty"`
	Config           *NodeConfigStatus    `json:"config,omitempty"`
	RuntimeHandlers  []NodeRuntimeHandler `json:"runtimeHandlers,omitempty"`
	Features         *NodeFeatures        `json:"features,omitempty"`
	DeclaredFeatures []string             `json:"declaredFeatures,omitempty"`
}

// A NodeCondition is one line of a node's state.
type NodeCondition struct {
	Type               string `json:"type"`
	Status             string `json:"status"`
	LastHeartbeatTime  Time   `json:"lastHeartbeatTime,omitempty"`
	LastTransitionTime Time   `json:"lastTransitionTime,omitempty"`
	Reason             string `json:"reason,omitempty"`
	Message            string `json:"message,omitempty"`
}

// A NodeAddress is an address or a name of a node.
type NodeAddress struct {
	Type    string `json:"type"`
	Address string `json:"address"`
}

// NodeDaemonEndpoints are the ports of a node's daemons.
type NodeDaemonEndpoints struct {
	KubeletEndpoint DaemonEndpoint `json:"kubeletEndpoint"`
}

// A DaemonEndpoint is the port of a daemon. In the API, too, its name begins with a capital.
type DaemonEndpoint struct {
	Port int32 `json:"Port"`
}

// NodeSystemInfo is a node's machine and its programs.
type NodeSystemInfo struct {
	MachineID               string          `json:"machineID"`
	SystemUUID              string          `json:"systemUUID"`
	BootID                  string          `json:"bootID"`
	KernelVersion           string          `json:"kernelVersion"`
	OSImage                 string          `json:"osImage"`
	ContainerRuntimeVersion string          `json:"containerRuntimeVersion"`
	KubeletVersion          string          `json:"kubeletVersion"`
	KubeProxyVersion        string          `json:"kubeProxyVersion"`
	OperatingSystem         string          `json:"operatingSystem"`
	Architecture            string          `json:"architecture"`
	Swap                    *NodeSwapStatus `json:"swap,omitempty"`
	RunningInUserNamespace  *bool           `json:"runningInUserNamespace,omitempty"`
}

// NodeSwapStatus is a node's swap.
type NodeSwapStatus struct {
	Capacity *int64 `json:"capacity,omitempty"`
}

// A ContainerImage is an image that a node has.
type ContainerImage struct {
	Names     []string `json:"names"`
	SizeBytes int64    `json:"sizeBytes,omitempty"`
}

// An AttachedVolume is a volume that is attached to a node.
type AttachedVolume struct {
	Name       string `json:"name"`
	DevicePath string `json:"devicePath"`
}

// NodeConfigStatus is the configuration of an older kubelet.
type NodeConfigStatus struct {
	Assigned      *NodeConfigSource `json:"assigned,omitempty"`
	Active        *NodeConfigSource `json:"active,omitempty"`
	LastKnownGood *NodeConfigSource `json:"lastKnownGood,omitempty"`
	Error         string            `json:"error,omitempty"`
}

// A NodeRuntimeHandler is a way to run containers.
type NodeRuntimeHandler struct {
	Name     string                      `json:"name"`
	Features *NodeRuntimeHandlerFeatures `json:"features,omitempty"`
}

// NodeRuntimeHandlerFeatures are the features of a runtime handler.
type NodeRuntimeHandlerFeatures struct {
	RecursiveReadOnlyMounts *bool `json:"recursiveReadOnlyMounts,omitempty"`
	UserNamespaces          *bool `json:"userNamespaces,omitempty"`
}

// NodeFeatures are the features of a node's container runtime.
type NodeFeatures struct {
	SupplementalGroupsPolicy *bool `json:"supplementalGroupsPolicy,omitempty"`
}
