package cniresults_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/canaryd/canaryd/internal/cniresults"
)

// Each file is one attachment; a missing folder is an error, and not "no containers".
func ExampleFolder_Read() {
	parent, err := os.MkdirTemp("", "cni")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(parent)
	dir := filepath.Join(parent, "results")
	folder := cniresults.New(dir)
	_, err = folder.Read()
	fmt.Println(err != nil)

	if err := os.Mkdir(dir, 0o700); err != nil {
		panic(err)
	}
	file := `{"kind":"cniCacheV1","containerId":"c1","ifName":"eth0","networkName":"pods",
		"cniArgs":[["K8S_POD_NAMESPACE","shop"],["K8S_POD_NAME","web"]],
		"capabilityArgs":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}`
	if err := os.WriteFile(filepath.Join(dir, "pods-c1-eth0"), []byte(file), 0o600); err != nil {
		panic(err)
	}
	reading, err := folder.Read()
	for attachment, pod := range reading.Attached {
		fmt.Println(attachment.Network, pod.Namespace, pod.Name, pod.HostPorts, err)
	}
	// Output:
	// true
	// pods shop web [8080/tcp] <nil>
}
