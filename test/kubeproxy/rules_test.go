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

// content has kube-proxy's rules: the lines of each chain, set and map in their order. Lines
// whose place does not matter are sorted. It omits canaryd's marks and rules of others.
type content map[string][]string

// read reads the rules of a kube-proxy in that mode in the namespace.
func (s *space) read(ctx context.Context, mode string) (content, error) {
	if mode == inNFTables {
		return s.readNFTables(ctx)
	}
	return s.readIPTables(ctx)
}

// unordered matches the chains that kube-proxy fills from a map of Go. Their rules have another
// order each time, except for the last one of nat's KUBE-SERVICES.
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

// chainOf returns kube-proxy's lines of a chain, and whether there may be any. It omits
// kube-proxy's canary, which does not always exist.
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
	// Services must precede the rule for node ports.
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

// parseNFTables adds nft's listing of a table, by chains and sets, without the comments of
// elements. kube-proxy (ensureElem in pkg/proxy/nftables) does not change an element that
// another service takes over with the same verdict. The comment remains the former service's.
func parseNFTables(family, text string, to content) {
	where := ""
	for line := range strings.Lines(joined(text)) {
		switch words := strings.Fields(line); {
		case len(words) == 0 || words[0] == "}":
		case words[0] == "table":
			where = family // the table's own flags
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

// joined puts a list that nft printed on several lines on one line.
func joined(text string) string { return broken.ReplaceAllString(text, ", ") }

// A difference counts the errors in the rules.
type difference struct {
	missing, stale, doubled, misplaced int
	// moved counts built-in chains whose jumps have another order. kube-proxy inserts each
	// missing jump at the top, so a flush during its full sync has that effect without canaryd
	// too.
	moved int
	lines []string
}

func (d difference) none() bool { return d.missing+d.stale+d.doubled+d.misplaced == 0 }

func (d difference) String() string {
	return fmt.Sprintf("%d missing, %d stale, %d doubled, %d chains in another order:\n%s", d.missing, d.stale, d.doubled, d.misplaced,
		strings.Join(d.lines[:min(len(d.lines), 30)], "\n"))
}

// compare returns the errors in the rules of a flushed kube-proxy, by those of another one. A
// chain counts as a rule.
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
