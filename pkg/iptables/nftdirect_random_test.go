package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/randrules"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// For random tables and scripts, iptables-restore and a write by bytes have the
// same result. If iptables-restore fails, nothing is written.
func TestAWriteByBytesDoesWhatTheTextDoes(t *testing.T) {
	seed := directSeed(t)
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		t.Logf("CANARYD_SEED=%d", seed)
		k, take := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}}), program(backend, family, "-restore")
		load := func(text string) {
			t.Helper()
			if backend == NFT {
				flushRuleset(t)
			} else {
				text = "*" + strings.Join(protect.Always(), "\nCOMMIT\n*") + "\nCOMMIT\n" + text
			}
			nstest.CommandInput(t, text, take)
		}
		saved := func() []string { return withoutCounters(nstest.Command(t, program(backend, family, "-save"))) }
		done, failed, direct := 0, 0, 0
		for i, table := range protect.Always() {
			r := rand.New(rand.NewPCG(seed, uint64(family)<<8|uint64(i)))
			d := &dice{t: t, r: r, family: family, table: table, load: load, take: take}
			d.draw(func() rules.Ruleset {
				if backend == NFT { // to learn the bytes of a text makes its table, even if the script fails
					return mustRead(t, k, family).Tables
				}
				return k.save(t, family)
			})
			for range testkit.Size(10, 40) {
				start, script := d.state(), d.script()
				var text bytes.Buffer
				if _, err := script.WriteTo(&text); err != nil {
					t.Fatal(err)
				}
				_, refused := tryTool(t, text.String(), take, "--noflush")
				want := saved()

				load(start)
				w := restoreOnce(t, k, family, script)
				if errors.Is(w.Err, nft.ErrStale) { // texts in force were not known
					w = restoreOnce(t, k, family, script)
				}
				if done++; refused != nil {
					failed++ // iptables-restore left the table as it was
				} else if w.Detour == nil {
					direct++
				}
				if diff := cmp.Diff(want, saved()); diff != "" || (w.Err == nil) != (refused == nil) {
					t.Fatalf("on\n%s\nthis script\n%s\nas text: %v\nby bytes: %v\n(-want +got)\n%s", start, &text, refused, w.Err, diff)
				}
			}
		}
		t.Logf("%d of %d scripts failed, and %d were written by bytes", failed, done, direct)
		if failed < done/20 || failed > done*9/10 || direct < (done-failed)*3/4 {
			t.Errorf("%d of %d scripts failed, and %d were written by bytes: too much of one kind", failed, done, direct)
		}
	})
}

// A dice draws states of one table and scripts.
type dice struct {
	t      *testing.T
	r      *rand.Rand
	family rules.Family
	table  rules.TableName
	load   func(text string) // replaces everything
	take   string            // the program that reads a text
	pool   []rules.Rule      // for any chain of the user's
	plain  []rules.Rule      // for any chain
}

var (
	diceChains = []string{"A", "B", "X", "Y", "Z"}
	plainJumps = []string{"", "ACCEPT", "RETURN", "DROP"}
)

// draw draws the pool. read returns the present rules.
func (d *dice) draw(read func() rules.Ruleset) {
	text := fmt.Sprintf("*%s\n:X - [0:0]\n:Y - [0:0]\n:Z - [0:0]\n", d.table)
	for range 150 {
		text += "-A X " + randrules.Draw(d.r, d.family, d.table).Spell(d.r) + "\n"
	}
	d.load(text + "COMMIT\n")
	for _, rule := range read()[d.table].Chain("X").Rules {
		if _, opaque := rule.Opaque(); opaque {
			continue
		}
		d.pool = append(d.pool, rule)
		if slices.Contains(plainJumps, rule.Target) && !strings.Contains(rule.Spec, "-o ") && !strings.Contains(rule.Spec, "-i ") {
			d.plain = append(d.plain, rule)
		}
	}
}

// chain draws a chain, now and then a built-in one.
func (d *dice) chain() string {
	if d.r.IntN(3) == 0 {
		builtin := rules.BuiltinChains(d.table)
		return builtin[d.r.IntN(len(builtin))]
	}
	return diceChains[d.r.IntN(len(diceChains))]
}

// rule draws a rule that is valid in the chain. Only X has jumps to chains, and
// rules that the kernel allows at some hooks only. No rule jumps to X.
func (d *dice) rule(chain string) rules.Rule {
	from := d.plain
	if chain == "X" {
		from = d.pool
	}
	return from[d.r.IntN(len(from))]
}

// state draws a table and loads it. It contains no match that the kernel forbids
// in a built-in chain.
func (d *dice) state() string {
	for {
		text := d.stateText()
		d.load("")
		if _, err := tryTool(d.t, text, d.take); err == nil {
			return text
		}
	}
}

func (d *dice) stateText() string {
	if d.r.IntN(10) == 0 {
		return "" // not even the table exists
	}
	text, content := fmt.Sprintf("*%s\n", d.table), ""
	standing := map[string]bool{}
	for range 1 + d.r.IntN(12) {
		chain := d.chain()
		if chain == "X" { // to which rules may jump
			standing["Y"], standing["Z"] = true, true
		}
		standing[chain] = true
		content += "-A " + chain + " " + d.rule(chain).Spec + "\n"
	}
	for chain := range standing {
		policy := "-"
		if rules.Builtin(d.table, chain) {
			policy = "ACCEPT"
		}
		text += ":" + chain + " " + policy + " [0:0]\n"
	}
	return text + content + "COMMIT\n"
}

// script draws a script.
func (d *dice) script() Script {
	s := Script{Table: d.table}
	for _, chain := range diceChains {
		if d.r.IntN(2) == 0 {
			s.Declare = append(s.Declare, chain)
		}
	}
	verbs := []Verb{Append, Append, Append, Append, Insert, Insert, Insert, Delete, Flush, Drop}
	for range 1 + d.r.IntN(6) {
		step := Step{Verb: verbs[d.r.IntN(len(verbs))], Chain: d.chain()}
		if rules.Builtin(d.table, step.Chain) && (step.Verb == Flush || step.Verb == Drop) {
			continue
		}
		if step.Verb == Append || step.Verb == Insert || step.Verb == Delete {
			step.Rule = d.rule(step.Chain)
		}
		if step.Verb == Insert || step.Verb == Delete {
			step.Index = d.r.IntN(3)
		}
		// iptables-nft-restore 1.8.9 counts and finds rules that a declaration
		// has deleted. It also puts a rule at the top if its place depends on
		// another rule of the same restore. The direct path need not do either.
		declared := slices.Contains(s.Declare, step.Chain)
		touched := declared || slices.ContainsFunc(s.Steps, func(s Step) bool { return s.Chain == step.Chain })
		if step.Verb == Insert && step.Index > 1 && touched || step.Verb == Delete && declared {
			continue
		}
		s.Steps = append(s.Steps, step)
	}
	return s
}
