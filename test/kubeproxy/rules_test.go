package kubeproxy

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// content is what kube-proxy wrote: the lines of each chain, set and map in their order. A line
// whose place says nothing is sorted. canaryd's marks and rules of others are left out.
type content map[string][]string

// read reads what a kube-proxy in that mode wrote in the namespace.
func (s *space) read(ctx context.Context, mode string) (content, error) {
	if mode == inNFTables {
		return s.readNFTables(ctx)
	}
	return s.readIPTables(ctx)
}

// unordered are the chains that kube-proxy fills from a map of Go: its rules come in another order
// each time, but for the last one of nat's KUBE-SERVICES.
var unordered = regexp.MustCompile(`^(KUBE-SERVICES|KUBE-EXTERNAL-SERVICES|KUBE-NODEPORTS|KUBE-PROXY-FIREWALL)$`)

func (s *space) readIPTables(ctx context.Context) (content, error) {
	got := content{}
	for _, family := range rules.Families() {
		var tables rules.Ruleset
		err := s.in(func() (err error) { tables, err = scenario.Tables(ctx, s.programs, family); return err })
		if err != nil {
			return nil, err
		}
		for _, table := range protect.Always() {
			if tables[table] == nil {
				continue
			}
			for _, chain := range tables[table].Chains {
				where := fmt.Sprintf("%s %s %s", family, table, chain.Name)
				if lines, ours := chainOf(table, chain); ours {
					got[where] = lines
				}
			}
		}
	}
	return got, nil
}

// chainOf returns kube-proxy's lines of a chain, and whether there may be some. Its canary comes
// and goes.
func chainOf(table rules.TableName, chain rules.Chain) (lines []string, ours bool) {
	builtin := rules.Builtin(table, chain.Name)
	if !builtin && (!strings.HasPrefix(chain.Name, "KUBE-") || strings.HasSuffix(chain.Name, "-CANARY")) {
		return nil, false
	}
	for _, r := range chain.Rules {
		if !builtin || strings.HasPrefix(r.Target, "KUBE-") {
			lines = append(lines, r.Spec)
		}
	}
	if !unordered.MatchString(chain.Name) {
		return lines, !builtin || len(lines) > 0
	}
	// Services must stand before the rule for node ports.
	n := slices.IndexFunc(lines, func(line string) bool { return strings.HasSuffix(line, "-j KUBE-NODEPORTS") })
	slices.Sort(lines[:max(n, 0)])
	slices.Sort(lines[n+1:])
	return lines, true
}

func (s *space) readNFTables(ctx context.Context) (content, error) {
	got := content{}
	for _, family := range []string{"ip", "ip6"} {
		text, err := s.run(ctx, "", "nft", "-s", "list", "tables")
		if err == nil && strings.Contains(text, "table "+family+" kube-proxy\n") {
			text, err = s.run(ctx, "", "nft", "-s", "list", "table", family, "kube-proxy")
		} else {
			text = ""
		}
		if err != nil {
			return nil, err
		}
		parseNFTables(family, text, got)
	}
	return got, nil
}

// parseNFTables adds what nft lists of a table, by chains and sets. The comments of elements are
// left out: kube-proxy (ensureElem in pkg/proxy/nftables) leaves an element alone that another
// service takes over with the same verdict, and its comment is that of the former service then.
func parseNFTables(family, text string, to content) {
	where := ""
	for line := range strings.Lines(joined(text)) {
		switch words := strings.Fields(line); {
		case len(words) == 0 || words[0] == "}":
		case words[0] == "table":
			where = family // flags of the table itself
		case len(words) == 3 && words[2] == "{" && !strings.HasPrefix(line, "\t\t"):
			where = family + " " + words[0] + " " + words[1]
			to[where] = nil
		case words[0] == "elements":
			line = ofElement.ReplaceAllString(line, "")
			inner := strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(line), "elements = { "), " }")
			to[where] = append(to[where], slices.Sorted(strings.SplitSeq(inner, ", "))...)
		default:
			to[where] = append(to[where], inBraces.ReplaceAllStringFunc(strings.TrimSpace(line), func(set string) string {
				return "{ " + strings.Join(slices.Sorted(strings.SplitSeq(strings.Trim(set, "{ }"), ", ")), ", ") + " }"
			}))
		}
	}
}

var (
	ofElement = regexp.MustCompile(` comment "[^"]*"`)
	inBraces  = regexp.MustCompile(`\{ [^{}]* \}`)
	broken    = regexp.MustCompile(`,\n\s*`)
)

// joined puts a list that nft broke into lines on one line.
func joined(text string) string { return broken.ReplaceAllString(text, ", ") }

// A difference is what is wrong with the rules.
type difference struct {
	missing, stale, doubled, misplaced int
	// moved are built-in chains whose jumps stand in another order. kube-proxy puts each jump that
	// it misses on top: a flush in the middle of its full sync leaves them so without canaryd, too.
	moved int
	lines []string
}

func (d difference) none() bool { return d.missing+d.stale+d.doubled+d.misplaced == 0 }

func (d difference) String() string {
	return fmt.Sprintf("%d missing, %d stale, %d doubled, %d chains in another order:\n%s", d.missing, d.stale, d.doubled, d.misplaced,
		strings.Join(d.lines[:min(len(d.lines), 30)], "\n"))
}

// compare returns what is wrong with the rules of a kube-proxy that was flushed, by those of one
// that was not. A chain counts like a rule.
func compare(want, got content) difference {
	var d difference
	say := func(n *int, format string, args ...any) {
		*n++
		d.lines = append(d.lines, fmt.Sprintf(format, args...))
	}
	places := slices.AppendSeq(slices.Collect(maps.Keys(want)), maps.Keys(got))
	slices.Sort(places)
	for _, where := range slices.Compact(places) {
		wanted, inWant := want[where]
		there, inGot := got[where]
		switch {
		case !inGot:
			say(&d.missing, "missing: %s", where)
		case !inWant:
			say(&d.stale, "stale: %s", where)
		}
		before, wants, gots := len(d.lines), counts(wanted), counts(there)
		for _, line := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(wanted, there)))) {
			switch w, g := wants[line], gots[line]; {
			case g < w:
				say(&d.missing, "missing: %s: %s", where, line)
			case w == 0:
				say(&d.stale, "stale: %s: %s", where, line)
			case g > w:
				say(&d.doubled, "doubled: %s: %s", where, line)
			}
		}
		switch {
		case before < len(d.lines) || slices.Equal(wanted, there):
		case builtin.MatchString(where):
			d.moved++
		default:
			say(&d.misplaced, "in another order: %s:\n  want %q\n  got  %q", where, wanted, there)
		}
	}
	return d
}

var builtin = regexp.MustCompile(`(^| )(PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING)$`)

func counts(lines []string) map[string]int {
	n := map[string]int{}
	for _, line := range lines {
		n[line]++
	}
	return n
}
