package iptables

import (
	"fmt"
	"os"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLegacyChainGoesDuringRead: an owner deletes a chain between the walk and
// the program that prints it. Everything stays known, unless the owner deletes
// chains all the time.
func TestLegacyChainGoesDuringRead(t *testing.T) {
	for _, c := range []struct {
		name     string
		going    int // chains to delete, one each time a family is printed
		readable bool
	}{{"once", 1, true}, {"each time", spellTries, false}} {
		t.Run(c.name, func(t *testing.T) {
			onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
				iptablesCommand(t, Legacy, family, "-N STAYS")
				iptablesCommand(t, Legacy, family, "-A STAYS -p tcp --dport 1")
				for i := range c.going {
					chain := fmt.Sprintf("GOES%d", i)
					iptablesCommand(t, Legacy, family, "-N "+chain)
					iptablesCommand(t, Legacy, family, "-A "+chain+" -p tcp --dport 2")
				}
				real, path := k.tools[family], t.TempDir()+"/save"
				script := "#!/bin/sh\nfor i in 0 1 2; do\n" +
					real.iptables + " -w 5 -F GOES$i 2>/dev/null && " + real.iptables + " -w 5 -X GOES$i && break\ndone\nexec " + real.save + " \"$@\"\n"
				if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
					t.Fatal(err)
				}
				tools := real
				tools.save = path
				k.tools[family] = tools
				got, err := k.Read(t.Context(), family)
				if !c.readable {
					if err == nil {
						t.Error("what changed all the time was read")
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				filter := got.Tables[rules.Filter]
				if filter.Chain("GOES0") != nil || filter.Chain("STAYS") == nil || len(filter.Chain("STAYS").Rules) != 1 {
					t.Errorf("it reads %v", describe(got.Tables, nil))
				}
			})
		})
	}
}
