package iptables

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lastTakings returns the takings of each commit after that genid, in words.
func lastTakings(t *testing.T, k *Kernel, after uint32) (words []string) {
	t.Helper()
	takings := k.Takings(t.Context())
	if !takings.Reach(after) {
		t.Errorf("what was taken after genid %d is not known: %+v", after, takings)
	}
	for _, taking := range takings.List {
		if int32(taking.Commit.Genid-after) <= 0 {
			continue
		}
		if taking.Commit.PID == 0 || taking.Commit.Comm == "" {
			t.Errorf("nobody is named for %+v", taking)
		}
		text := taking.Family.String() + " " + string(taking.Table)
		if taking.Deleted {
			text += " deleted"
		}
		slices.Sort(taking.Chains)
		for _, chain := range taking.Chains {
			text += " -" + chain
		}
		for _, r := range taking.Rules {
			text += " " + strings.Join([]string{r.Chain, r.Target, r.Comment}, ":")
		}
		words = append(words, text)
	}
	return words
}

func genidNow(t *testing.T, k *Kernel) uint32 {
	t.Helper()
	snapshot, err := k.Read(t.Context(), rules.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(snapshot.Digest)
}

// TestTakings: the takings match the commits' effects, by the kernel's own
// messages.
func TestTakings(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		nstest.NeedProgram(t, "nft")
		k := openKernel(t, Config{Backend: NFT})
		restore := func(flags, text string) {
			nstest.Command(t, "sh", "-c", "printf '"+text+"' | iptables-nft-restore "+flags)
		}
		const mark = `-m comment --comment canaryd-canary:00ff`
		restore("", `*nat\n:SVC - [0:0]\n:EMPTY - [0:0]\n:CANARY - [0:0]\n-A PREROUTING -j SVC\n-A PREROUTING -p tcp -j ACCEPT\n-A SVC -j RETURN\n-A SVC -p udp -j RETURN\n-A CANARY `+mark+`\nCOMMIT\n`+
			`*filter\n:MINE - [0:0]\n-A MINE -j ACCEPT\nCOMMIT\n`)
		for _, step := range []struct {
			name string
			do   func()
			want []string
		}{
			{"a rule is added", func() { iptablesCommand(t, NFT, rules.IPv4, "-t nat -A SVC -j ACCEPT") }, []string{"ipv4 nat"}},
			{"a chain is written anew with as many rules", func() {
				restore("-n", `*nat\n:SVC - [0:0]\n-A SVC -j ACCEPT\n-A SVC -j ACCEPT\n-A SVC -j ACCEPT\nCOMMIT\n`)
			}, []string{"ipv4 nat"}},
			{"a chain shrinks", func() { restore("-n", `*nat\n:SVC - [0:0]\n-A SVC -j ACCEPT\nCOMMIT\n`) }, []string{"ipv4 nat -SVC"}},
			{"a jump is deleted", func() { iptablesCommand(t, NFT, rules.IPv4, "-t nat -D PREROUTING -j SVC") }, []string{"ipv4 nat -PREROUTING PREROUTING:SVC:"}},
			{"an empty chain is deleted", func() { iptablesCommand(t, NFT, rules.IPv4, "-t nat -X EMPTY") }, []string{"ipv4 nat -EMPTY"}},
			{"saved rules replace the canary", func() {
				restore("", `*nat\n:CANARY - [0:0]\n-A CANARY `+strings.Replace(mark, "00ff", "11ee", 1)+`\nCOMMIT\n`)
			}, []string{"ipv4 nat -PREROUTING -SVC CANARY::canaryd-canary:00ff"}},
			{"a flush", func() { iptablesCommand(t, NFT, rules.IPv4, "-t nat -F") }, []string{"ipv4 nat -CANARY CANARY::canaryd-canary:11ee"}},
			{"another family's table", func() { nstest.Command(t, "nft", "add", "table", "inet", "nat") }, nil},
			{"the whole ruleset", func() { nstest.Command(t, "nft", "flush", "ruleset") }, []string{"ipv4 filter deleted", "ipv4 nat deleted"}},
		} {
			before := genidNow(t, k)
			step.do()
			got := lastTakings(t, k, before)
			slices.Sort(got)
			if diff := cmp.Diff(step.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", step.name, diff)
			}
		}
	})
}

// TestOwnTakings: canaryd's own deletions are not reported.
func TestOwnTakings(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		k := openKernel(t, Config{Backend: NFT})
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -N X")
		before := genidNow(t, k)
		s := begin(t, k)
		if _, err := s.Read(t.Context(), rules.IPv4); err != nil {
			t.Fatal(err)
		}
		payload := Payload{rules.IPv4: {{Table: rules.Nat, Declare: []string{"X"}, Steps: []Step{{Verb: Drop, Chain: "X"}}}}}
		if written := s.Restore(t.Context(), payload)[rules.IPv4]; written.Err != nil {
			t.Fatal(written.Err)
		}
		if got := lastTakings(t, k, before); got != nil {
			t.Errorf("our own write took %q", got)
		}
	})
}

// TestTakingsAreBounded: the oldest commit is dropped first, with all its
// takings.
func TestTakingsAreBounded(t *testing.T) {
	var log takingsLog
	log.restart(10)
	for genid := uint32(11); genid < 11+takingsKept; genid++ {
		for _, family := range rules.Families() {
			log.note(nft.Event{Kind: unix.NFT_MSG_DELCHAIN, Family: family, Chain: []byte("X")}, rules.Nat)
		}
		log.end(nft.Commit{Genid: genid, PID: 1}, time.Now())
	}
	all := log.all()
	if len(all.List) != takingsKept || all.List[0].Commit.Genid != all.Since+1 || all.Reach(all.Since-1) || !all.Reach(all.Since) {
		t.Errorf("%d takings from genid %d since %d", len(all.List), all.List[0].Commit.Genid, all.Since)
	}
	log.restart(99999)
	if all := log.all(); len(all.List) != 0 || all.Reach(99998) {
		t.Errorf("after an overflow there are %d takings", len(all.List))
	}
}
