package cniresults

import (
	"strings"
	"testing"
)

// FuzzParse: a file that is understood names the same container as the end of its own name.
func FuzzParse(f *testing.F) {
	f.Add("n-c-eth0", []byte(`{"kind":"cniCacheV1","containerId":"c","networkName":"n","ifName":"eth0","cniArgs":[["K8S_POD_NAME","web-0"]],"capabilityArgs":{"portMappings":[{"hostPort":8080,"protocol":"tcp"}]}}`))
	f.Add("", []byte(`{}`))
	f.Fuzz(func(t *testing.T, name string, text []byte) {
		a, pod, err := parse(name, text)
		if err != nil {
			return
		}
		if a.Container == "" || !strings.HasPrefix(name, a.Network+"-"+a.Container+"-") || len(pod.HostPorts) > maxPorts {
			t.Errorf("%q is %+v, with %d ports", name, a, len(pod.HostPorts))
		}
	})
}
