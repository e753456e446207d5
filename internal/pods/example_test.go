package pods_test

import (
	"context"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/cniresults"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// files is the content of libcni's folder; *cniresults.Folder reads the real one.
type files map[protect.Attachment]cniresults.Pod

func (f files) Read() (cniresults.Reading, error) {
	return cniresults.Reading{Folder: "results", Attached: f}, nil
}

// A runtime removes a pod's file with the pod: a replay leaves out the rules of such a pod.
func ExampleWatch() {
	ctx, now := context.Background(), time.Unix(1e9, 0)
	web := protect.Attachment{Network: "pods", Container: "c1"}
	rule, err := rules.ParseRule(`-p tcp --dport 8080 -m comment --comment "name: \"pods\" id: \"c1\"" -j DNAT --to-destination 10.0.0.1:80`)
	if err != nil {
		panic(err)
	}
	want := rules.Generation{rules.IPv4.Table(rules.Nat): {Chains: []rules.Chain{{Name: "CNI-DN-1", Rules: []rules.Rule{rule}}}}}

	var watch pods.Watch
	libcni := files{web: {Namespace: "shop", Name: "web", Ends: true}, {Network: "pods", Container: "c2"}: {Ends: true}}
	reading, _ := watch.Read(ctx, libcni, now)
	watch.Take(ctx, reading, now)
	watch.HaveRules(1, want)
	fmt.Println(watch.Names(watch.Gone()))

	delete(libcni, web)
	now = now.Add(time.Second)
	reading, _ = watch.Read(ctx, libcni, now)
	watch.Take(ctx, reading, now)
	fmt.Println(watch.Names(watch.Gone()))
	// Output:
	// []
	// [shop/web]
}
