package kube

// The types below are the JSON of Kubernetes' API. Each has all fields of the API's type of
// that name, because otherwise the decoder could not recognise a misspelled field. k8s.io/api
// has them too, but adds 6.6 MB to the program. test/kubernetes compares both field by field.

// Labels and values of the API that rules depend on.
const (
	TypeClusterIP    = "ClusterIP"
	TypeNodePort     = "NodePort"
	TypeLoadBalancer = "LoadBalancer"
	TypeExternalName = "ExternalName"

	ClusterIPNone = "None" // of a headless service

	PolicyCluster = "Cluster" // of external and internal traffic
	PolicyLocal   = "Local"

	AffinityNone     = "None"
	AffinityClientIP = "ClientIP"

	IPModeVIP = "VIP" // of a load balancer's address; Proxy is the other mode

	TCP  = "TCP"
	UDP  = "UDP"
	SCTP = "SCTP"

	IPv4 = "IPv4" // of addresses
	IPv6 = "IPv6"
	FQDN = "FQDN" // of slices only

	InternalIP = "InternalIP" // of a node's addresses
	ExternalIP = "ExternalIP"

	LabelServiceName = "kubernetes.io/service-name"
	LabelZone        = "topology.kubernetes.io/zone"
)

// TypeMeta is the type of an object.
type TypeMeta struct {
	Kind       string `json:"kind,omitempty"`
	APIVersion string `json:"apiVersion,omitempty"`
}

// ObjectMeta has the fields of objects of all kinds.
type ObjectMeta struct {
	Name                       string               `json:"name,omitempty"`
	GenerateName               string               `json:"generateName,omitempty"`
	Namespace                  string               `json:"namespace,omitempty"`
	SelfLink                   string               `json:"selfLink,omitempty"`
	UID                        string               `json:"uid,omitempty"`
	ResourceVersion            string               `json:"resourceVersion,omitempty"`
	Generation                 int64                `json:"generation,omitempty"`
	CreationTimestamp          Time                 `json:"creationTimestamp,omitempty"`
	DeletionTimestamp          Time                 `json:"deletionTimestamp,omitempty"`
	DeletionGracePeriodSeconds *int64               `json:"deletionGracePeriodSeconds,omitempty"`
	Labels                     map[string]string    `json:"labels,omitempty"`
	Annotations                map[string]string    `json:"annotations,omitempty"`
	OwnerReferences            []OwnerReference     `json:"ownerReferences,omitempty"`
	Finalizers                 []string             `json:"finalizers,omitempty"`
	ManagedFields              []ManagedFieldsEntry `json:"managedFields,omitempty"`
}

// An OwnerReference names an object whose deletion also deletes this one.
type OwnerReference struct {
	APIVersion         string `json:"apiVersion"`
	Kind               string `json:"kind"`
	Name               string `json:"name"`
	UID                string `json:"uid"`
	Controller         *bool  `json:"controller,omitempty"`
	BlockOwnerDeletion *bool  `json:"blockOwnerDeletion,omitempty"`
}

// A ManagedFieldsEntry lists the fields that a program has set.
type ManagedFieldsEntry struct {
	Manager     string `json:"manager,omitempty"`
	Operation   string `json:"operation,omitempty"`
	APIVersion  string `json:"apiVersion,omitempty"`
	Time        Time   `json:"time,omitempty"`
	FieldsType  string `json:"fieldsType,omitempty"`
	FieldsV1    Any    `json:"fieldsV1,omitempty"`
	Subresource string `json:"subresource,omitempty"`
}

// A Condition is one line of an object's state.
type Condition struct {
	Type               string `json:"type"`
	Status             string `json:"status"`
	ObservedGeneration int64  `json:"observedGeneration,omitempty"`
	LastTransitionTime Time   `json:"lastTransitionTime,omitempty"`
	Reason             string `json:"reason"`
	Message            string `json:"message"`
}

// A Service is a v1 Service.
type Service struct {
	TypeMeta
	ObjectMeta `json:"metadata"`
	Spec       ServiceSpec   `json:"spec"`
	Status     ServiceStatus `json:"status"`
}

// ServiceSpec is the wanted state of a service.
type ServiceSpec struct {
	Ports                         []ServicePort          `json:"ports,omitempty"`
	Selector                      map[string]string      `json:"selector,omitempty"`
	ClusterIP                     string                 `json:"clusterIP,omitempty"`
	ClusterIPs                    []string               `json:"clusterIPs,omitempty"`
	Type                          string                 `json:"type,omitempty"`
	ExternalIPs                   []string               `json:"externalIPs,omitempty"`
	SessionAffinity               string                 `json:"sessionAffinity,omitempty"`
	LoadBalancerIP                string                 `json:"loadBalancerIP,omitempty"`
	LoadBalancerSourceRanges      []string               `json:"loadBalancerSourceRanges,omitempty"`
	ExternalName                  string                 `json:"externalName,omitempty"`
	ExternalTrafficPolicy         string                 `json:"externalTrafficPolicy,omitempty"`
	HealthCheckNodePort           int32                  `json:"healthCheckNodePort,omitempty"`
	PublishNotReadyAddresses      bool                   `json:"publishNotReadyAddresses,omitempty"`
	SessionAffinityConfig         *SessionAffinityConfig `json:"sessionAffinityConfig,omitempty"`
	IPFamilies                    []string               `json:"ipFamilies,omitempty"`
	IPFamilyPolicy                *string                `json:"ipFamilyPolicy,omitempty"`
	AllocateLoadBalancerNodePorts *bool                  `json:"allocateLoadBalancerNodePorts,omitempty"`
	LoadBalancerClass             *string                `json:"loadBalancerClass,omitempty"`
	InternalTrafficPolicy         *string                `json:"internalTrafficPolicy,omitempty"`
	TrafficDistribution           *string                `json:"trafficDistribution,omitempty"`
}

// A ServicePort is a port of a service.
type ServicePort struct {
	Name        string      `json:"name,omitempty"`
	Protocol    string      `json:"protocol,omitempty"`
	AppProtocol *string     `json:"appProtocol,omitempty"`
	Port        int32       `json:"port"`
	TargetPort  IntOrString `json:"targetPort,omitempty"`
	NodePort    int32       `json:"nodePort,omitempty"`
}

// SessionAffinityConfig is for affinity by the client's address, the only kind of affinity.
type SessionAffinityConfig struct {
	ClientIP *ClientIPConfig `json:"clientIP,omitempty"`
}

// ClientIPConfig has the time for which a client keeps its endpoint.
type ClientIPConfig struct {
	TimeoutSeconds *int32 `json:"timeoutSeconds,omitempty"`
}

// ServiceStatus is the actual state of a service.
type ServiceStatus struct {
	LoadBalancer LoadBalancerStatus `json:"loadBalancer"`
	Conditions   []Condition        `json:"conditions,omitempty"`
}

// LoadBalancerStatus has the addresses of a service's load balancer.
type LoadBalancerStatus struct {
	Ingress []LoadBalancerIngress `json:"ingress,omitempty"`
}

// A LoadBalancerIngress is an address of a load balancer.
type LoadBalancerIngress struct {
	IP       string       `json:"ip,omitempty"`
	Hostname string       `json:"hostname,omitempty"`
	IPMode   *string      `json:"ipMode,omitempty"`
	Ports    []PortStatus `json:"ports,omitempty"`
}

// A PortStatus is a port of a load balancer's address.
type PortStatus struct {
	Port     int32   `json:"port"`
	Protocol string  `json:"protocol"`
	Error    *string `json:"error,omitempty"`
}

// An EndpointSlice is a discovery.k8s.io/v1 EndpointSlice.
type EndpointSlice struct {
	TypeMeta
	ObjectMeta  `json:"metadata"`
	AddressType string         `json:"addressType"`
	Endpoints   []Endpoint     `json:"endpoints"`
	Ports       []EndpointPort `json:"ports"`
}

// An Endpoint is a pod, or another backend, behind a service.
type Endpoint struct {
	Addresses          []string           `json:"addresses"`
	Conditions         EndpointConditions `json:"conditions"`
	Hostname           *string            `json:"hostname,omitempty"`
	TargetRef          *ObjectReference   `json:"targetRef,omitempty"`
	DeprecatedTopology map[string]string  `json:"deprecatedTopology,omitempty"`
	NodeName           *string            `json:"nodeName,omitempty"`
	Zone               *string            `json:"zone,omitempty"`
	Hints              *EndpointHints     `json:"hints,omitempty"`
}

// EndpointConditions say whether an endpoint takes traffic.
type EndpointConditions struct {
	Ready       *bool `json:"ready,omitempty"`
	Serving     *bool `json:"serving,omitempty"`
	Terminating *bool `json:"terminating,omitempty"`
}

// An ObjectReference names an object.
type ObjectReference struct {
	Kind            string `json:"kind,omitempty"`
	Namespace       string `json:"namespace,omitempty"`
	Name            string `json:"name,omitempty"`
	UID             string `json:"uid,omitempty"`
	APIVersion      string `json:"apiVersion,omitempty"`
	ResourceVersion string `json:"resourceVersion,omitempty"`
	FieldPath       string `json:"fieldPath,omitempty"`
}

// EndpointHints name the places that should use an endpoint.
type EndpointHints struct {
	ForZones []Hint `json:"forZones,omitempty"`
	ForNodes []Hint `json:"forNodes,omitempty"`
}

// A Hint names a zone or a node.
type Hint struct {
	Name string `json:"name"`
}

// An EndpointPort is a port of all endpoints of a slice.
type EndpointPort struct {
	Name        *string `json:"name,omitempty"`
	Protocol    *string `json:"protocol,omitempty"`
	Port        *int32  `json:"port,omitempty"`
	AppProtocol *string `json:"appProtocol,omitempty"`
}
