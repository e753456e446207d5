package iptablestest_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// filterText is a payload of one table, mangleText of another.
const (
	filterText = "*filter\n:OURS - [0:0]\n-A OURS -j RETURN\nCOMMIT\n"
	mangleText = "*mangle\n:OURS - [0:0]\n-A OURS -j RETURN\nCOMMIT\n"
)

func restore(t *testing.T, s iptables.Session, family rules.Family, text string) bool {
	t.Helper()
	raced, err := write(t, s, family, text)
	must(t, err)
	return raced
}

// mustParseScripts reads the format of Scripts.WriteTo, even rules that iptables would refuse.
func mustParseScripts(t *testing.T, text string) (scripts iptables.Scripts) {
	t.Helper()
	for line := range strings.Lines(text) {
		verb, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name, opens := strings.CutPrefix(verb, "*"); opens {
			scripts = append(scripts, iptables.Script{Table: name})
			continue
		}
		s := &scripts[len(scripts)-1]
		switch verb[0] {
		case ':':
			s.Declare = append(s.Declare, verb[1:])
		case '-':
			step := iptables.Step{Verb: iptables.Verb(verb[1])}
			step.Chain, rest, _ = strings.Cut(rest, " ")
			if number, spec, _ := strings.Cut(rest, " "); step.Verb == iptables.Insert {
				var err error
				step.Index, err = strconv.Atoi(number)
				must(t, err)
				rest = spec
			}
			if rest != "" {
				var err error
				step.Rule, err = rules.ParseRule(rest)
				must(t, err)
			}
			s.Steps = append(s.Steps, step)
		}
	}
	return scripts
}

// write passes a text to a session's Restore as the payload of one family.
func write(t *testing.T, s iptables.Session, family rules.Family, text string) (raced bool, err error) {
	t.Helper()
	written := s.Restore(t.Context(), iptables.Payload{family: mustParseScripts(t, text)})
	if len(written) != 1 {
		t.Fatalf("a Restore of one family answers for %v", written)
	}
	return written[family].Raced, written[family].Err
}

func TestFakeRaced(t *testing.T) {
	onBoth(t, func(t *testing.T, f *iptablestest.Fake) {
		onNFT := f.Info().Backend == iptables.NFT
		f.BeforeRestore(func() { must(t, f.Bypassing().Flush(v4, rules.Nat, "")) })
		s := begin(t, f)
		read(t, s, v4)
		if raced := restore(t, s, v4, filterText); raced != onNFT {
			t.Errorf("raced is %v, want %v", raced, onNFT)
		}
		f.BeforeRestore(nil)
		if !onNFT {
			return
		}
		_, err := write(t, s, v4, filterText)
		wantErr(t, "after a race", err, nft.ErrStale)
		read(t, s, v4)
		if restore(t, s, v4, filterText) {
			t.Error("raced, though nobody else wrote")
		}
	})
}

// TestFakeFaults: a session restores two tables under each fault; the reason and the written
// tables must be as documented.
func TestFakeFaults(t *testing.T) {
	type outcome struct {
		Reason         iptables.Reason
		Mangle, Filter bool // written
	}
	for _, tt := range []struct {
		name  string
		fault func(*iptablestest.Fake)
		want  []outcome // of one restore after the other
	}{
		{"none", func(*iptablestest.Fake) {}, []outcome{{"", true, true}}},
		{"FailRestores", func(f *iptablestest.Fake) { f.FailRestores(2, iptables.ReasonMissingSet) }, []outcome{
			{iptables.ReasonMissingSet, false, false}, {iptables.ReasonMissingSet, false, false}, {"", true, true},
		}},
		{"FailRestores for ever", func(f *iptablestest.Fake) { f.FailRestores(-1, iptables.ReasonLock) }, []outcome{
			{iptables.ReasonLock, false, false}, {iptables.ReasonLock, false, false},
		}},
		{"PartialCommit", func(f *iptablestest.Fake) { f.PartialCommit(2) }, []outcome{
			{iptables.ReasonOther, true, false}, {"", true, true},
		}},
		{"Lie", func(f *iptablestest.Fake) { f.Lie(1) }, []outcome{{"", false, false}, {"", true, true}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, f *iptablestest.Fake) {
				tt.fault(f)
				s := begin(t, f)
				var got []outcome
				for range tt.want {
					read(t, s, v4)
					_, err := write(t, s, v4, mangleText+filterText)
					var o outcome
					if refused := (*iptables.RestoreError)(nil); errors.As(err, &refused) {
						o.Reason = refused.Reason
					} else if err != nil {
						t.Error(err)
					}
					tables := read(t, f, v4).Tables
					o.Mangle = tables[rules.Mangle].Chain("OURS") != nil
					o.Filter = tables[rules.Filter].Chain("OURS") != nil
					got = append(got, o)
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("outcomes (-want +got):\n%s", diff)
				}
				if f.Restores() != len(tt.want) || len(f.Payloads(v4)) != len(tt.want) {
					t.Errorf("%d restores, %d payloads, want %d", f.Restores(), len(f.Payloads(v4)), len(tt.want))
				}
			})
		})
	}
}

func TestFakeReadFaults(t *testing.T) {
	fault := errors.New("a fault")
	onBoth(t, func(t *testing.T, f *iptablestest.Fake) {
		f.FailReads(fault)
		_, err := f.Read(t.Context(), v4)
		wantErr(t, "Read", err, fault)
		_, err = begin(t, f).Read(t.Context(), v4)
		wantErr(t, "a session's Read", err, fault)
		_, err = f.Probe(t.Context(), v4, nil)
		wantErr(t, "Probe", err, nil)
		f.FailReads(nil)

		f.FailProbes(fault)
		_, err = f.Probe(t.Context(), v4, nil)
		wantErr(t, "Probe", err, fault)
		_, err = f.Stamp(t.Context(), v4)
		wantErr(t, "Stamp", err, fault)
		f.FailProbes(nil)

		f.DropTableFromReads(v4, rules.Nat, fault)
		f.DropTableFromReads(v4, rules.Raw, fault) // does not exist
		snap := read(t, f, v4)
		if diff := cmp.Diff(map[rules.TableName]error{rules.Nat: fault}, snap.Unreadable, cmp.Comparer(errors.Is)); diff != "" {
			t.Errorf("unreadable (-want +got):\n%s", diff)
		}
		if len(snap.Tables) != 0 {
			t.Errorf("tables are %v, want none", snap.Tables)
		}
		if want, got := "# Table `nat' is incompatible, use 'nft' tool.\n", f.Save(v4); got != want {
			t.Errorf("Save returns %q, want %q", got, want)
		}
		if got := [3]int{f.Reads(), f.Probes(), f.Stamps()}; got != [3]int{3, 2, 1} {
			t.Errorf("reads, probes, stamps are %v", got)
		}
	})
}

func TestFakeRestoreTakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := iptablestest.NewFake(iptables.NFT)
		f.RestoreTakes(7 * time.Second)
		go func() {
			time.Sleep(3 * time.Second)
			must(t, f.RestoreNoflush(v6, filterText))
		}()
		s, err := f.Begin(t.Context())
		must(t, err)
		read(t, s, v4)
		start := time.Now()
		if !restore(t, s, v4, filterText) {
			t.Error("not raced, though somebody wrote meanwhile")
		}
		if took := time.Since(start); took != 7*time.Second {
			t.Errorf("took %v, want 7s", took)
		}
		must(t, s.Close())
		if _, err := s.Read(t.Context(), v4); err == nil {
			t.Error("a closed session reads")
		}
	})
}
