package protect_test

import (
	"fmt"
	"testing"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
)

// BenchmarkProtects measures Protects for the names on a node of 5,000 services: chains of
// kube-proxy, built-in targets, and chains of others.
func BenchmarkProtects(b *testing.B) {
	names := []string{"KUBE-SERVICES", "ACCEPT", "MARK", "DNAT", "KUBE-MARK-MASQ", "RETURN", "corp-input", ""}
	for i := range 32 {
		names = append(names, fmt.Sprintf("KUBE-SEP-%016d", i), "KUBE-SVC-"+hash16, "KUBE-SEP-"+hash16)
	}
	for _, list := range [][]string{{"kube", "cni"}, {"auto"}} {
		s, err := protect.NewSelector(list)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprint(list), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				s.Protects(names[i%len(names)])
			}
		})
		b.Run(fmt.Sprint(list, "others"), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				s.Protects(names[i%8])
			}
		})
	}
	b.Run("OfChain", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			owners.OfChain(names[i%len(names)])
		}
	})
}
