package kube_test

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// From objects, as kubectl prints them, to the rules that kube-proxy writes for them.
func ExampleGenerate() {
	objects, err := kube.Decode("objects.yaml", []byte(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80, protocol: TCP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.1.0.7], conditions: {ready: true}}]
`))
	if err != nil {
		panic(err)
	}
	generation, skipped, err := kube.Generate(objects, kube.DefaultOptions())
	if err != nil {
		panic(err)
	}
	services, _ := generation[rules.IPv4.Table(rules.Nat)].Chain("KUBE-SERVICES")
	fmt.Println(services.Rules[0].Spec)
	fmt.Println(len(skipped), "objects were skipped")
	// Output:
	// -d 10.96.0.10/32 -p tcp -m comment --comment "shop/web cluster IP" -m tcp --dport 80 -j KUBE-SVC-E3PXEPMWAWIUT6ZV
	// 0 objects were skipped
}
