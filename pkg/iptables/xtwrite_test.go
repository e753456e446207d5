package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// labels returns rules as people read them, with the digests of their bytes.
func labels(list []rules.Rule) (labels []string) {
	for _, r := range list {
		labels = append(labels, r.Label())
	}
	return labels
}

// savedLines returns iptables-legacy's output for table filter, with its counts.
func savedLines(t *testing.T, family rules.Family) []string {
	t.Helper()
	return withoutCounters(nstest.Command(t, program(Legacy, family, "-save"), "-c", "-t", "filter"))
}

// bytesOf returns the bytes of a chain's rules in the kernel, as RuleBytes does.
func bytesOf(t *testing.T, family rules.Family, chain string) []string {
	t.Helper()
	s, err := openXT(family)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	var found []string
	err = s.entries(rules.Filter, func(info xtInfo, data []byte) error {
		content, err := takeApart(family, info, data)
		for _, piece := range content.named[chain].rules {
			found = append(found, fmt.Sprintf("%x %t", content.says(piece, nil), piece.falls))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// Once one table of a family is written, the read must not count as stale: the
// written rules would count as missing. If another process writes to the second
// table meanwhile, its rule stays, and the result says that the write raced.
func TestTheSecondTableOfLegacyBytesIsNeverStale(t *testing.T) {
	for _, tt := range []struct {
		name   string
		behind uintptr // the process writes after a question with this option; 0: before the entries are read
		always bool    // it writes at each read, not only at the first
	}{
		{"before the entries are read", 0, false},
		{"before the entries are read once more", soGetEntries, false},
		{"before the table is replaced", soGetInfo, false},
		{"each time before the table is replaced", soGetInfo, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
				odd, plain := lineBreak(t, k, family)
				list := []rules.Rule{plain, odd}
				socket := k.reader.(xtReader).sockets[family]
				const placing = 2 // after the digest, canaryd reads to place its rules
				reads, writes := 0, 0
				write := func() {
					writes++
					iptablesOf(t, family, "-t", "mangle", "-A", "FORWARD", "-p", "udp", "-j", "DROP")
				}
				iptablesCommand(t, Legacy, family, "-F MINE")
				iptablesCommand(t, Legacy, family, "-t mangle -N MINE")
				s := begin(t, k)
				mustRead(t, s, family)
				socket.ask = func(fd int, level, option uintptr, buf []byte) (int, error) {
					if nft.String(buf[:xtTableNameLen]) != "mangle" {
						return getsockopt(fd, level, option, buf)
					}
					if option == soGetEntries {
						reads++
					}
					due := reads >= placing && (tt.always || writes == 0)
					if due && tt.behind == 0 {
						write()
					}
					n, err := getsockopt(fd, level, option, buf)
					if due && tt.behind == option {
						write()
					}
					return n, err
				}
				w := s.Restore(t.Context(), Payload{family: {replayOf(rules.Filter, "MINE", list), replayOf(rules.Mangle, "MINE", list)}})[family]
				socket.ask = getsockopt
				var refused *RestoreError
				switch {
				case writes == 0 || !w.Raced || errors.Is(w.Err, nft.ErrStale):
					t.Errorf("written %d times: %+v", writes, w)
				case !tt.always && w.Err != nil:
					t.Error(w.Err)
				case tt.always && (!errors.As(w.Err, &refused) || refused.Textless):
					t.Errorf("the answer to a writer that never rests: %v", w.Err)
				}
				now := mustRead(t, s, family).Tables
				if got := now[rules.Filter].Chain("MINE").Rules; !slices.Equal(got, list) {
					t.Errorf("MINE of filter is %v", labels(got))
				}
				if got := now[rules.Mangle].Chain("MINE").Rules; !tt.always && !slices.Equal(got, list) {
					t.Errorf("MINE of mangle is %v", labels(got))
				}
				if got := now[rules.Mangle].Rules("FORWARD"); len(got) != writes {
					t.Errorf("of %d rules of the other process %d are left", writes, len(got))
				}
			})
		})
	}
}

// iptablesOf executes a command of iptables-legacy that ignores the lock.
func iptablesOf(t *testing.T, family rules.Family, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program(Legacy, family, ""), args...)
	cmd.Env = append(os.Environ(), lockVariable+"="+t.TempDir()+"/lock")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// lineBreak returns a rule that has no text with any iptables, and a rule with a
// text.
func lineBreak(t *testing.T, k *Kernel, family rules.Family) (odd, plain rules.Rule) {
	t.Helper()
	iptablesCommand(t, Legacy, family, "-N MINE")
	addOdd(t, Legacy, family, "MINE", []string{"-p", "tcp", "-m", "comment", "--comment", "x\ny", "-j", "ACCEPT"})
	iptablesCommand(t, Legacy, family, "-A MINE -p tcp -j ACCEPT")
	list := guarded(t, k, family).Tables[rules.Filter].Chain("MINE").Rules
	if !list[0].HasBytes() {
		t.Fatalf("%v has no bytes", list[0])
	}
	return list[0], list[1]
}

// If the kernel refuses the bytes, or they make no rule, the table is unchanged,
// and the error names the rule without a text.
func TestLegacyBytesThatAreRefusedChangeNothing(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		odd, plain := lineBreak(t, k, family)
		entry, _, _, _ := odd.Bytes()
		lines := savedLines(t, family)
		_, _, matches, _ := nft.NextAttr(entry)
		head := entry[:len(entry)-len(matches)]
		for name, bad := range map[string][]byte{
			"a match that no kernel has": bytes.Replace(entry, []byte("comment"), []byte("nosuch!"), 1),
			"a match behind the target":  slices.Concat(entry, matches),
			"no conditions":              matches,
			"conditions of another size": bytes.Replace(entry, head, append([]byte{head[0] + 8, 0, 1, 0}, append(slices.Clone(head[4:]), make([]byte, 8)...)...), 1),
			"a cut off end":              entry[:len(entry)-4],
			"nothing":                    make([]byte, len(entry)),
		} {
			script := replayOf(rules.Filter, "MINE", []rules.Rule{plain, rules.OpaqueBytes(bad, nil, "ACCEPT", "odd")})
			script.Declare = append(script.Declare, "FRESH")
			script.Steps = append(script.Steps, Step{Verb: Append, Chain: "INPUT", Rule: rules.Rule{Spec: "-j FRESH", Target: "FRESH"}})
			s := begin(t, k)
			mustRead(t, s, family)
			err := s.Restore(t.Context(), Payload{family: {script}})[family].Err
			if refused, ok := err.(*RestoreError); !ok || !refused.Textless {
				t.Errorf("%s: %v", name, err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(lines, savedLines(t, family)); diff != "" {
				t.Errorf("%s: it leaves (-want +got):\n%s", name, diff)
			}
		}
	})
}

// A process that ignores the lock writes while canaryd writes rules by their
// bytes. Its rule stays, no part of the script is written, and the caller has to
// read again.
func TestLegacyBytesAreNotWrittenOverAnothersRules(t *testing.T) {
	for _, tt := range []struct {
		when   string
		read   int     // of the table's entries
		behind uintptr // the process writes after a question with this option; 0: before the read
		text   bool    // iptables-restore has to write a text before
	}{
		{"before the digest is compared", 1, 0, false},
		{"before the entries are read", 2, 0, false},
		{"before the entries are read once more", 2, soGetEntries, false},
		{"before the table is replaced", 2, soGetInfo, false},
		{"before iptables-restore writes", 2, 0, true},
		{"while iptables-restore writes", 3, 0, true},
		{"before a table with texts is replaced", 3, soGetInfo, true},
	} {
		t.Run(tt.when, func(t *testing.T) {
			onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
				odd, plain := lineBreak(t, k, family)
				if tt.text {
					plain.Spec = "-p tcp -m quota --quota 7 -j ACCEPT"
				}
				lines := savedLines(t, family)
				socket := k.reader.(xtReader).sockets[family]
				reads, wrote := 0, false
				write := func() {
					wrote = true
					iptablesOf(t, family, "-A", "FORWARD", "-p", "udp", "-j", "DROP")
				}
				s := begin(t, k)
				mustRead(t, s, family)
				socket.ask = func(fd int, level, option uintptr, buf []byte) (int, error) {
					if option == soGetEntries {
						reads++
					}
					due := !wrote && reads == tt.read
					if due && tt.behind == 0 {
						write()
					}
					n, err := getsockopt(fd, level, option, buf)
					if due && tt.behind == option {
						write()
					}
					return n, err
				}
				script := replayOf(rules.Filter, "MINE", []rules.Rule{plain, odd, plain})
				err := s.Restore(t.Context(), Payload{family: {script}})[family].Err
				socket.ask = getsockopt
				if !errors.Is(err, nft.ErrStale) || !wrote {
					t.Errorf("written %t: %v", wrote, err)
				}
				at := slices.Index(lines, "COMMIT")
				want := slices.Insert(slices.Clone(lines), at, "[0:0] -A FORWARD -p udp -j DROP")
				slices.Sort(want)
				got := savedLines(t, family)
				slices.Sort(got)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("the table (-want +got):\n%s", diff)
				}
				if !mustRead(t, s, family).Moved {
					t.Error("the next read does not say that another process wrote")
				}
				if err := s.Restore(t.Context(), Payload{family: {script}})[family].Err; err != nil {
					t.Error(err)
				}
				if list := mustRead(t, s, family).Tables[rules.Filter].Chain("MINE").Rules; !slices.Equal(list, []rules.Rule{plain, odd, plain}) {
					t.Errorf("MINE is %v", labels(list))
				}
			})
		})
	}
}

// A text of the second table turns out to be a rule in force, which was opaque. It is not written
// a second time, and neither is the first table: the caller has to read again.
func TestATextOfALaterTableIsNotWrittenTwice(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		declared := rules.Rule{Spec: "-p tcp -m quota --quota 7 -j X", Target: "X"}
		plain := rules.Rule{Spec: "-p udp -j X", Target: "X"}
		for _, table := range []string{"filter", "mangle"} {
			iptablesCommand(t, Legacy, family, "-t "+table+" -N MINE")
			iptablesCommand(t, Legacy, family, "-t "+table+" -N X")
		}
		iptablesCommand(t, Legacy, family, "-t mangle -A MINE "+declared.Spec)
		write := func(scripts ...Script) error {
			s := begin(t, k)
			defer s.Close()
			mustRead(t, s, family)
			return s.Restore(t.Context(), Payload{family: scripts})[family].Err
		}
		first := Script{Table: rules.Filter, Steps: []Step{{Verb: Append, Chain: "MINE", Rule: plain}}}
		if err := write(first, Script{Table: rules.Mangle, Steps: []Step{{Verb: Append, Chain: "MINE", Rule: declared}}}); !errors.Is(err, nft.ErrStale) {
			t.Errorf("the error is %v", err)
		}
		now := mustRead(t, k, family).Tables
		if diff := cmp.Diff([]rules.Rule{declared}, now[rules.Mangle].Rules("MINE")); diff != "" {
			t.Errorf("mangle (-want +got):\n%s", diff)
		}
		if list := now[rules.Filter].Rules("MINE"); len(list) > 0 {
			t.Errorf("filter has %v", labels(list))
		}
		other := rules.Rule{Spec: "-p tcp -m quota --quota 8 -j X", Target: "X"}
		if err := write(first, Script{Table: rules.Mangle, Steps: []Step{{Verb: Append, Chain: "MINE", Rule: other}}}); err != nil {
			t.Error(err)
		}
		now = mustRead(t, k, family).Tables
		if diff := cmp.Diff([]rules.Rule{declared, other}, now[rules.Mangle].Rules("MINE")); diff != "" || len(now[rules.Filter].Rules("MINE")) != 1 || now[rules.Mangle].Chain(TextChain) != nil {
			t.Errorf("at last filter is %v, and mangle (-want +got):\n%s", now[rules.Filter].Chains, diff)
		}
	})
}

// A script deletes a rule behind a rule that an earlier step added.
func TestADeletionFindsTheRulesOfEarlierSteps(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		_, plain := lineBreak(t, k, family)
		iptablesCommand(t, Legacy, family, "-A MINE -p udp -j DROP")
		drop := mustRead(t, k, family).Tables[rules.Filter].Rules("MINE")[2]
		s := begin(t, k)
		mustRead(t, s, family)
		script := replayOf(rules.Filter, "MINE", []rules.Rule{plain, drop, plain})
		script.Steps = append(script.Steps, Step{Verb: Delete, Chain: "MINE", Rule: drop})
		if err := s.Restore(t.Context(), Payload{family: {script}})[family].Err; err != nil {
			t.Fatal(err)
		}
		if got := mustRead(t, s, family).Tables[rules.Filter].Rules("MINE"); !slices.Equal(got, []rules.Rule{plain, plain}) {
			t.Errorf("MINE is %v", labels(got))
		}
	})
}
