package page

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/browser"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

var (
	// pictures is a folder for pictures of all states in all looks, for people.
	pictures = flag.String("pictures", "", "write pictures of TestStates into this `folder`")
	ofDocs   = flag.Bool("of-docs", false, "write only the pictures that docs/operate.md shows")
)

// documented are the pictures of docs/operate.md: each look shows some of the states.
var documented = map[string]browser.Look{
	"history": desk, "outage": deskDark, "outage with replays that fail": phone, "native tables": phoneDark, "paused by ada": desk,
	"unknown": phone, "one rule in quarantine": deskDark, "nothing yet": phoneDark, "stopped": phone, "a closed base chain": phoneDark,
}

// pictureOf names the file with a picture of a state.
func pictureOf(state string, look browser.Look) string {
	light := map[bool]string{true: "dark", false: "light"}[look.Dark]
	return fmt.Sprintf("%s-%d-%s.png", strings.ReplaceAll(state, " ", "-"), look.Width, light)
}

// TestDocumentedStates: docs/operate.md shows ten pictures, and the folder has these and no other.
func TestDocumentedStates(t *testing.T) {
	const folder = "../../docs/images/states"
	text, err := os.ReadFile("../../docs/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	var shown, kept, want []string
	for _, m := range regexp.MustCompile(`\(images/states/([^)]+)\)`).FindAllStringSubmatch(string(text), -1) {
		shown = append(shown, m[1])
	}
	files, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		kept = append(kept, f.Name())
	}
	for state, look := range documented {
		want = append(want, pictureOf(state, look))
	}
	slices.Sort(shown)
	slices.Sort(want)
	if d := cmp.Diff(want, shown); d != "" {
		t.Errorf("the pictures of docs/operate.md (-want +got):\n%s", d)
	}
	if d := cmp.Diff(want, kept); d != "" {
		t.Errorf("the files in docs/images/states (-want +got):\n%s", d)
	}
}

// TestStates: in each state the page says it first, keeps to its policy, and requests only
// itself. It is readable on a desk and on a phone, by day and by night.
func TestStates(t *testing.T) {
	with := func(status func() api.Status, change func(*api.Status)) func() api.Status {
		return func() api.Status {
			s := status()
			change(&s)
			return s
		}
	}
	soon := time.Now().Add(30 * time.Minute)
	tests := []struct {
		name   string
		status func() api.Status
		dead   bool
		class  string
		title  string   // the beginning of the title
		shows  []string // words on the page
	}{
		{"empty", healthyNode, false, "healthy", "Healthy", []string{"12,460 rules in 4,147 chains are in force", "No flush seen since", "af31f3a40aee"}},
		{"history", busy, false, "healthy", "Healthy", []string{"Last flush 2 min ago, back after 48 ms.", "table_deleted", "all tables", "6 hours ago"}},
		{"outage", outage, false, "lost", "Rules missing since",
			[]string{"Missing for", "ipv4 nat (emptied), ipv4 filter (jumps_missing); unknown: ipv6 nat.", "canaryd is putting them back.", "so far",
				"A process keeps undoing", "2 rules were lost and could not be put back.", "ipv4/filter/KUBE-ROUTER-INPUT", "Both backends hold rules", "✕ jumps_missing", "? unknown"}},
		{"observed outage", with(outage, func(s *api.Status) { s.Mode = api.Observe }), false, "lost", "Rules missing since",
			[]string{"Observe mode: their owner has to put them back.", "canaryd only observes"}},
		{"outage in a pause", with(outage, func(s *api.Status) { s.Paused, s.PausedUntil = true, soon }), false, "lost", "Rules missing since",
			[]string{"Paused: nothing is put back until ", soon.UTC().Format("15:04:05 MST") + ", or canaryd resume.", "heal, paused"}},
		{"outage with replays that fail", with(outage, func(s *api.Status) {
			s.Failing = []api.Failing{{Flush: s.Flushes[0].ID, Attempts: 3, Retry: soon, Reason: "a rule names an ipset that is missing", Advice: "create the set"}}
		}), false, "lost", "Rules missing since",
			[]string{"They are not back, because a rule names an ipset that is missing; create the set. Failed 3 times, next try in"}},
		{"a loss that cannot be read", with(healthyNode, func(s *api.Status) {
			s.Families[rules.IPv4][rules.Nat] = canary.Unknown
			s.LossSince = time.Now().Add(-5 * time.Second)
		}), false, "lost", "Rules may be missing since", []string{"unknown: ipv4 nat"}},
		{"unknown", with(healthyNode, func(s *api.Status) { s.Families[rules.IPv6][rules.Filter] = canary.Unknown }), false, "unknown", "Unknown since",
			[]string{"Could not be read, or has no canary yet: ipv6 filter.", "the log says why"}},
		{"unreadable", with(healthyNode, func(s *api.Status) {
			s.Families[rules.IPv6][rules.Filter] = canary.Unknown
			s.Unreadable = map[rules.Family]string{rules.IPv6: "operation not permitted"}
		}), false, "unknown", "Unknown since", []string{"The kernel says, of ipv6: operation not permitted."}},
		{"long not looked", with(healthyNode, func(s *api.Status) { s.LastKnown = time.Now().Add(-5 * time.Minute) }), false, "unknown", "Unknown since",
			[]string{"has not known the content of the tables for 5 min"}},
		{"the loop is stuck", healthyNode, true, "unknown", "Unknown since", []string{"the loop has not turned for 12s"}},
		{"nothing yet", func() api.Status { return api.Status{} }, false, "unknown", "Not known yet", []string{"No family has been looked at yet", "There is none yet: nothing could be put back"}},
		{"one rule in quarantine", with(busy, func(s *api.Status) { s.Quarantined = outage().Quarantined[:1] }), false, "partial", "One rule was lost and could not be put back",
			[]string{"In ipv4 filter. All else that ought to be in force is.", "One rule was lost and could not be put back. The kernel refuses it,", "ipv4/filter/KUBE-ROUTER-INPUT"}},
		{"after a restart", with(busy, func(s *api.Status) {
			s.Flushes[0].Outcome, s.Flushes[0].Earlier, s.Flushes[0].AbsentSeconds = api.Interrupted, true, 0
		}), false, "healthy", "Healthy", []string{"Last flush 2 min ago.", "interrupted: canaryd ended before its replay", ", seen by an earlier run of canaryd"}},
		{"paused", with(healthyNode, func(s *api.Status) { s.Paused, s.PausedUntil = true, soon }), false, "paused", "Paused until", []string{"The rules are in force."}},
		{"paused by ada", with(healthyNode, func(s *api.Status) {
			s.Paused, s.PausedUntil, s.PausedBy, s.PausedWhy, s.PausedSince = true, soon, "ada", "OPS-12: a <new> firewall", soon.Add(-time.Hour)
		}), false, "paused", "Paused until", []string{"Replays are paused by ada since " + soon.Add(-time.Hour).UTC().Format(time.RFC3339), "The reason: OPS-12: a <new> firewall."}},
		{"a closed base chain", with(healthyNode, func(s *api.Status) {
			s.PolicyDrops = []api.PolicyDrop{{Family: tableid.Inet, Table: "t", Native: true, Chain: "input", Was: "ACCEPT", Since: time.Now().Add(-time.Hour)}}
		}), false, "partial", "Healthy, but policy of inet t input is DROP since ", []string{"A base chain drops packets that no rule accepts.", "canaryd leaves it so.", "nft 'chain inet t input { policy accept; }'"}},
		{"native tables", with(busy, func(s *api.Status) {
			s.Families = map[rules.Family]api.Verdicts{}
			s.Generation.Rules, s.Generation.Chains = 0, 0
			s.Native = []api.NativeTable{
				{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact, Chains: 1410, Rules: 1890, Elements: 2210},
				{Family: "ip6", Table: "ip6 kube-proxy", Verdict: canary.Emptied, Chains: 1402, Rules: 1811, Elements: 2200, Why: "rules were flushed"},
				{Family: "inet", Table: "inet a-table-with-a-rather-long-name-of-its-owners", Verdict: canary.Unknown, Chains: 3, Rules: 9},
				{Family: "inet", Table: "inet firewalld", Verdict: canary.Intact, Immune: true, Why: "firewalld owns it: no other process can flush it"},
			}
			s.LossSince = time.Now().Add(-3 * time.Second)
		}), false, "lost", "Rules missing since", []string{"✓ intact", "✕ emptied", "? unknown", "rules were flushed", "1 native table needs no guard", "firewalld owns it"}},
		{"a canaryd that says who it is", with(healthyNode, func(s *api.Status) {
			s.Protect, s.Owners = "auto", []api.GuardedOwner{{Owner: "kube-proxy", Word: "kube", Chains: 13}}
			s.Keeper = map[rules.Family]api.FamilyKeeper{rules.IPv4: {State: "kept"}, rules.IPv6: {State: "unavailable", Reason: "no nf_conntrack"}}
			s.Standby = map[rules.Family]api.FamilyStandby{rules.IPv4: {State: api.StandbyArmed}, rules.IPv6: {State: api.StandbyArmed}}
			s.Backend.Mixed = true
		}), false, "healthy", "Healthy", []string{"version 0.1.0", "started", "protects auto", "keeper ipv4 kept, ipv6 unavailable (no nf_conntrack)", "standby ipv4 armed, ipv6 armed", "CanarydMixedBackends"}},
		{"stopped", with(healthyNode, func(s *api.Status) { s.Stopped = true }), false, "stopped", "Stopped", []string{"A cleanup removed the canaries"}},
		{"mismatch, one family, behind", with(healthyNode, func(s *api.Status) {
			delete(s.Families, rules.IPv6)
			s.DisabledFamilies = map[rules.Family]string{rules.IPv6: "the kernel lacks it"}
			s.Families[rules.IPv4][rules.Nat] = canary.Changed
			s.Backend.Mismatch, s.JournalError, s.StateError = true, "no space left on device", "read-only file system"
			s.LearningPendingSince = time.Now().Add(-3 * time.Minute)
		}), false, "partial", "Healthy", []string{"IPv6 not watched: the kernel lacks it", "✓ changed", "The other backend is in use by now.", "The generation is behind.", "Flush records are not on disk.", "The latest rules are not on disk."}},
	}
	b := start(t)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			st := newStage(t, tt.status)
			st.dead.Store(tt.dead)
			tab := st.open(b, desk)
			if got := tab.text("h1"); !strings.HasPrefix(got, tt.title) {
				t.Errorf("the page says %q, want %q", got, tt.title)
			}
			if got := tab.value(`document.getElementById('part-verdict').className`); got != "verdict "+tt.class {
				t.Errorf("it looks like %q, want %q", got, tt.class)
			}
			for _, look := range []browser.Look{deskDark, desk, phone, phoneDark} {
				if *pictures != "" && (!*ofDocs || documented[tt.name] == look) {
					tab.must(tab.Show(look))
					tab.must(tab.Screenshot(filepath.Join(*pictures, pictureOf(tt.name, look)), true))
				}
			}
			tab.value(`document.querySelectorAll('details').forEach((d) => { d.open = true; })`)
			text := strings.Join(strings.Fields(tab.text("main")), " ")
			for _, words := range tt.shows {
				if !strings.Contains(text, words) {
					t.Errorf("no %q on the page:\n%s", words, text)
				}
			}
			for _, look := range []browser.Look{deskDark, desk, phone, phoneDark} {
				tab.must(tab.Show(look))
				var flaws []string
				tab.eval(flawsScript, &flaws)
				if len(flaws) > 0 {
					t.Errorf("%+v: %s", look, strings.Join(flaws, "\n"))
				}
			}
			tab.clean()
		})
	}
}

// flawsScript returns flaws that make the page hard to read. They are text with less contrast
// than WCAG 2.1 AA, text beyond the right edge, and verdicts that are broken or wider than
// their cells.
const flawsScript = `(() => {
  const flaws = [];
  const colour = (text) => text.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = colour(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
      if (c[3] !== 0) flaws.push('half transparent: ' + e.className);
    }
    return [255, 255, 255];
  };
  let seen = 0;
  for (const e of document.body.querySelectorAll('*')) {
    const own = [...e.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE).map((n) => n.data.trim()).join('');
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!own || !box.width || style.visibility === 'hidden' || e.closest('.hush, script, noscript')) continue;
    seen++;
    const [a, b] = [light(colour(style.color)), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) flaws.push('contrast ' + ratio.toFixed(2) + ' of "' + own + '"');
    if (box.right > innerWidth + 0.5) flaws.push('over the edge at ' + box.right + ': "' + own + '"');
  }
  for (const e of document.querySelectorAll('.matrix thead th, .cell')) {
    if (e.scrollWidth > e.clientWidth + 1) flaws.push('wider than its cell: "' + e.textContent + '"');
    for (const text of [...e.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE)) {
      for (const word of text.data.matchAll(/\S+/g)) {
        const range = document.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        if (range.getClientRects().length > 1) flaws.push('a broken word: "' + word[0] + '"');
      }
    }
  }
  if (seen < 20) flaws.push('only ' + seen + ' texts seen');
  if (document.documentElement.scrollWidth > innerWidth) flaws.push('it scrolls sideways: ' + document.documentElement.scrollWidth + ' in ' + innerWidth);
  return flaws;
})()`

// TestHostile: names of chains and programs are strangers' words. They are plain text in the
// first page, and after a refresh.
func TestHostile(t *testing.T) {
	const script, picture = `<script>window.stung=1</script>`, `"><img src=x onerror=window.stung=1>'`
	evil := func() api.Status {
		s := outage()
		for i := range s.Flushes {
			f := &s.Flushes[i]
			f.Culprit.Comm, f.Kind, f.Outcome = script, script, picture
			f.Writers = []api.Culprit{{PID: 1, Comm: picture}}
			f.Lost.Tables[0].PerChain = []api.ChainLoss{{Chain: script, Rules: 1}, {Chain: picture, Rules: 1}}
			f.Lost.Tables[0].Kind = picture
			f.Policies = []string{script}
			f.ID = fmt.Sprintf(`%d"onclick="window.stung=1`, i)
		}
		s.Generation.Source, s.CanaryChain, s.Backend.Reason = script, picture, script
		s.Quarantined[0].Chain = script
		s.Families[rules.IPv4][rules.Nat] = script
		return s
	}
	b := start(t)
	check := func(tab *tab) {
		t.Helper()
		if got := tab.value(`typeof window.stung + document.images.length + document.scripts.length`); got != "undefined01" {
			t.Errorf("something got through: %s", got)
		}
		tab.value(`document.querySelectorAll('details').forEach((d) => { d.open = true; })`)
		for _, place := range []string{".by", ".record .chains", ".record dl", ".warnings", ".cards"} {
			if got := tab.text(place); !strings.Contains(got, script) {
				t.Errorf("%s does not name it: %s", place, got)
			}
		}
	}
	t.Run("loaded", func(t *testing.T) {
		tab := newStage(t, evil).open(b, desk)
		check(tab)
		tab.clean()
	})
	t.Run("refreshed", func(t *testing.T) {
		st := newStage(t, healthyNode)
		tab := st.open(b, desk)
		st.show(evil)
		tab.within("the records", `document.querySelector('.by') !== null`)
		check(tab)
		tab.clean()
	})
	t.Run("script put in by a stranger", func(t *testing.T) {
		tab := newStage(t, healthyNode).open(b, desk)
		tab.value(`(() => { const s = document.createElement('script'); s.textContent = 'window.stung=1'; document.body.append(s); })()`)
		if got := tab.value(`typeof window.stung`); got != "undefined" {
			t.Error("the page's policy lets strange scripts run")
		}
		tab.within("the browser to say so", `true`)
		if len(tab.Troubles()) == 0 {
			t.Error("no word of it: a refused script of our own would go unseen too")
		}
	})
}

// TestRefresh: the page follows the node by itself. Open records stay open, selected text stays
// selected, and a screen reader announces the verdict.
func TestRefresh(t *testing.T) {
	st := newStage(t, busy)
	tab := st.open(start(t), desk)
	title := tab.value(`document.title`)
	tab.value(`(() => {
		const record = document.querySelectorAll('details')[1];
		record.open = true;
		record.querySelector('summary').focus();
		getSelection().selectAllChildren(record.querySelector('.chains code'));
		window.kept = record;
	})()`)
	st.show(outage)
	tab.within("the outage", `document.querySelector('h1').textContent.startsWith('Rules missing since')`)
	var got struct {
		Records              int
		Open                 []int
		Kept, Focus          bool
		Marked, Say, Warning string
	}
	const look = `({
		Records: document.querySelectorAll('details').length,
		Open: [...document.querySelectorAll('details')].flatMap((d, i) => d.open ? [i] : []),
		Kept: window.kept.isConnected, Focus: document.activeElement === window.kept.querySelector('summary'),
		Marked: String(getSelection()), Say: document.getElementById('say').textContent.slice(0, 13),
		Warning: document.querySelector('.warnings strong')?.textContent ?? '',
	})`
	tab.eval(look, &got)
	want := got
	want.Records, want.Open, want.Kept, want.Focus = 6, []int{2}, true, true
	want.Marked, want.Say, want.Warning = "KUBE-SERVICES", "Rules missing", "A process keeps undoing the replays."
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("in the outage (-want +got):\n%s", diff)
	}
	if got := tab.value(`document.title`); got == title || !strings.HasPrefix(got, "Rules missing since") {
		t.Errorf("the tab is still called %q", got)
	}
	icon := tab.value(`document.getElementById('icon').href`)

	st.show(busy)
	tab.within("the end of it", `document.querySelector('h1').textContent === 'Healthy'`)
	tab.eval(look, &got)
	want.Records, want.Open, want.Say, want.Warning = 5, []int{1}, "Healthy", ""
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after it (-want +got):\n%s", diff)
	}
	if tab.value(`document.getElementById('icon').href`) == icon {
		t.Error("the icon is that of the outage")
	}
	tab.clean()
}

// TestHeld: a person can stop the page's updates.
func TestHeld(t *testing.T) {
	st := newStage(t, healthyNode)
	tab := st.open(start(t), desk)
	tab.within("the first refresh", `performance.getEntriesByType('resource').length > 0`)
	tab.value(`document.getElementById('live').click()`)
	if got := tab.text("#live"); got != "not live" {
		t.Errorf("the button says %q", got)
	}
	st.show(outage)
	asked := len(tab.Requests())
	testkit.Pass(t, 5*time.Second, "that more than two refreshes are left out")
	if now := len(tab.Requests()); now > asked+1 || tab.text("h1") != "Healthy" {
		t.Errorf("it asked %d times more, and says %q", now-asked, tab.text("h1"))
	}
	tab.value(`document.getElementById('live').click()`)
	tab.within("the outage", `document.querySelector('h1').textContent.startsWith('Rules missing since')`)
	tab.clean()
}

// TestStale: a page whose canaryd does not answer says so, and does not show an old state as
// the present one.
func TestStale(t *testing.T) {
	st := newStage(t, healthyNode)
	tab := st.open(start(t), desk)
	for _, broken := range []int32{503, 200} { // refused, or a stranger's page
		st.broken.Store(broken)
		tab.within("a stale page", `document.body.classList.contains('stale')`)
		if got := tab.text("#stale"); !strings.HasPrefix(got, "canaryd does not answer. What is shown here is as of ") {
			t.Errorf("it says %q", got)
		}
		if got := tab.value(`document.title`); !strings.HasPrefix(got, "? ") {
			t.Errorf("the tab is called %q", got)
		}
		st.broken.Store(0)
		tab.within("a live page", `!document.body.classList.contains('stale') && document.getElementById('stale').hidden && document.title.startsWith('Healthy')`)
	}
}

// TestKeyboard: records open without a mouse.
func TestKeyboard(t *testing.T) {
	tab := newStage(t, busy).open(start(t), desk)
	for range 20 {
		tab.must(tab.Press("Tab"))
		if tab.value(`document.activeElement.nodeName`) == "SUMMARY" {
			break
		}
	}
	tab.must(tab.Press("Enter"))
	tab.within("the record", `document.activeElement.parentElement.open === true`)
	if got := tab.text("details[open]"); !strings.Contains(got, "canaryd status --flush 660c8b90ccb7b") {
		t.Errorf("it shows %q", got)
	}
}

// TestNoScript: without JavaScript the page is complete, and says that it does not refresh
// itself.
func TestNoScript(t *testing.T) {
	look := desk
	look.NoScript = true
	tab := newStage(t, outage).open(start(t), look)
	if got := tab.text("h1"); !strings.HasPrefix(got, "Rules missing since") {
		t.Errorf("it says %q", got)
	}
	if got := tab.text("header"); !strings.Contains(got, "only with JavaScript") || strings.Contains(got, "live") {
		t.Errorf("its head says %q", got)
	}
	for range 20 {
		tab.must(tab.Press("Tab"))
		if tab.value(`document.activeElement.nodeName`) == "SUMMARY" {
			break
		}
	}
	tab.must(tab.Press("Enter"))
	if got := tab.text("details[open]"); !strings.Contains(got, "emptied") {
		t.Errorf("a record that was opened shows %q", got)
	}
}

// TestUpgrade: a canaryd with another page makes the browser load it.
func TestUpgrade(t *testing.T) {
	st := newStage(t, healthyNode)
	tab := st.open(start(t), desk)
	tab.value(`window.old = true, document.documentElement.dataset.build = 'older'`)
	tab.within("the new page", `window.old === undefined && document.documentElement.dataset.build !== 'older'`)
	tab.clean()
}

// TestAccessible: the page has the headings, landmarks and names that a screen reader needs.
func TestAccessible(t *testing.T) {
	tab := newStage(t, outage).open(start(t), desk)
	var tree struct {
		Nodes []struct {
			Ignored bool
			Role    struct{ Value string }
			Name    struct{ Value json.RawMessage }
		}
	}
	tab.must(tab.Call("Accessibility.getFullAXTree", nil, &tree))
	var got []string
	for _, n := range tree.Nodes {
		var name string
		_ = json.Unmarshal(n.Name.Value, &name) // some have no name
		switch n.Role.Value {
		case "heading", "region", "main", "table", "button", "columnheader", "rowheader":
			if !n.Ignored {
				got = append(got, n.Role.Value+" "+strings.Split(name, " since ")[0])
			}
		}
	}
	for _, want := range []string{"main ", "heading Rules missing", "region Rules missing", "region Warnings", "region Canaries", "region Generation",
		"region This canaryd", "region Flushes", "table The verdict on each table of each IP family", "button live", "columnheader nat", "rowheader IPv4"} {
		if !slices.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
}

// TestMany: a hundred flushes of thousands of chains make a page of limited length.
func TestMany(t *testing.T) {
	many := func() api.Status {
		s := healthyNode()
		for i := range 100 {
			f := flush(fmt.Sprint("f", i), time.Duration(i)*time.Hour, canary.Emptied, reload.Proved)
			table := f.Lost.Tables[0]
			for range 5 {
				table.PerChain = append(table.PerChain, table.PerChain...)
			}
			f.Lost.Tables = []api.TableLoss{table, table}
			s.Flushes = append(s.Flushes, f)
		}
		return s
	}
	tab := newStage(t, many).open(start(t), phone)
	var records int
	tab.eval(`document.querySelectorAll('details').length`, &records)
	if records != 50 || !strings.Contains(tab.text("main"), "50 older ones are in canaryd status -o json") {
		t.Errorf("%d records", records)
	}
	if got := tab.value(`document.querySelectorAll('details')[0].querySelectorAll('.chains li').length`); got != "60" {
		t.Errorf("%s chains of one flush", got)
	}
	var size int
	tab.eval(`document.documentElement.outerHTML.length`, &size)
	if size > 600_000 {
		t.Errorf("the page has %d characters", size)
	}
	tab.clean()
}
