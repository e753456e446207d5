package source

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const site = "*filter\n:SITE -\n-A SITE -s 192.0.2.0/24 -j DROP\n-I INPUT -j SITE\nCOMMIT\n"

func TestLoadErrors(t *testing.T) {
	a := service("a", 1)
	for name, c := range map[string]struct {
		files map[string]string // below m and r
		want  string            // DIR is replaced by the folder
	}{
		"no manifest":       {map[string]string{"r/site.v4": site}, "manifest: stat DIR/m: no such file or directory"},
		"an empty folder":   {map[string]string{"m/.a.yaml": a, "m/a.txt": a, "r/site.v4": site}, "manifest: DIR/m: the folder holds no file *.yaml, *.yml or *.json"},
		"an empty file":     {map[string]string{"m/a.yaml": a, "m/b.yaml": "", "r/site.v4": site}, "manifest: DIR/m/b.yaml: holds no object: delete the file, or write an empty List if no services are meant"},
		"an unknown field":  {map[string]string{"m/a.yaml": "---\n" + strings.Replace(a, "clusterIP:", "clusterAddress:", 1), "r/site.v4": site}, "manifest: DIR/m/a.yaml:1: Service shop/a: clusterAddress: there is no such field"},
		"no rules":          {map[string]string{"m/a.yaml": a, "r/readme": ""}, "rules-dir: DIR/r: the folder holds no file *.v4 or *.v6"},
		"a file of rules":   {map[string]string{"m/a.yaml": a, "r": site}, "rules-dir: DIR/r: is not a folder"},
		"an empty fragment": {map[string]string{"m/a.yaml": a, "r/site.v4": "# later\n"}, "rules-dir: DIR/r/site.v4: holds no table: delete the file if it shall declare no rules"},
		"a wrong line":      {map[string]string{"m/a.yaml": a, "r/site.v6": site}, `rules-dir: DIR/r/site.v6:3: "-A SITE -s 192.0.2.0/24 -j DROP" has the address 192.0.2.0 in a file of rules for ipv6`},
		"canaryd's own":     {map[string]string{"m/a.yaml": a, "r/site.v4": strings.ReplaceAll(site, "SITE", "TWEETY")}, "rules-dir: DIR/r/site.v4:2: TWEETY in filter is canaryd's own chain: choose another name"},
		"two files, one chain": {map[string]string{"m/a.yaml": a, "r/a.v4": site, "r/b.v4": site},
			"rules-dir: DIR/r/b.v4:2: chain SITE of filter is declared in DIR/r/a.v4:2 too: give one of them another name"},
		"a chain of the manifest's": {map[string]string{"m/a.yaml": a, "r/site.v4": "*nat\n:KUBE-SVC-ABCDEFGHIJKLMNOP -\nCOMMIT\n"},
			"sources: DIR/r/site.v4:2: chain KUBE-SVC-ABCDEFGHIJKLMNOP belongs to the manifest DIR/m too: give one of them another name"},
		"a circle": {map[string]string{"m/a.yaml": a, "r/a.v4": "*filter\n:A -\n-A A -j B\nCOMMIT\n", "r/b.v4": "*filter\n:B -\n:X -\n-A B -j X\n-A X -g A\nCOMMIT\n"},
			"rules-dir: DIR/r/a.v4:2: chains of filter jump in a circle: A -> B -> X -> A"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			write(t, dir, c.files)
			_, err := Load(t.Context(), manifest(filepath.Join(dir, "m")), RulesDir{Dir: filepath.Join(dir, "r"), Canary: "TWEETY"})
			if err == nil {
				t.Fatal("no error")
			}
			if got := strings.ReplaceAll(err.Error(), dir, "DIR"); got != c.want {
				t.Errorf("error\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

func TestEveryErrorOfAFolderIsTold(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": "x", "b.yaml": service("b", 2), "c.yaml": "kind: Service"})
	_, err := Load(t.Context(), manifest(dir))
	if err == nil || !strings.Contains(err.Error(), "a.yaml:1: ") || !strings.Contains(err.Error(), "; "+dir+"/c.yaml:1: ") || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %v, want one line about a.yaml and c.yaml", err)
	}
}

func TestPipeIsNoManifest(t *testing.T) {
	if _, err := Load(t.Context(), manifest(os.DevNull)); err == nil || !strings.Contains(err.Error(), "is not a regular file") {
		t.Errorf("error %v", err)
	}
}

func TestSourcesTogether(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"m/a.yaml": service("a", 1),
		"m/b.yaml": "apiVersion: v1\nkind: List\nitems: []\n", // no services are meant
		"r/10.v4":  site + "*nat\n:SITE-NAT -\n-A SITE-NAT -j KUBE-MARK-MASQ\n-A POSTROUTING -j SITE-NAT\nCOMMIT\n",
		"r/20.v4":  "*filter\n:LATER -\n-A LATER -j SITE\n-A LATER -j DOCKER-USER\n-I INPUT -j LATER\nCOMMIT\n",
		"r/20.v6":  "*filter\n:SITE -\nCOMMIT\n", // another family's
	})
	declared, err := Load(t.Context(), manifest(filepath.Join(dir, "m")), RulesDir{Dir: filepath.Join(dir, "r")})
	must(t, err)
	if got, want := own(declared), []string{"ipv4 filter LATER", "ipv4 filter SITE", "ipv4 nat SITE-NAT", "ipv6 filter SITE"}; !slices.Equal(got, want) {
		t.Errorf("chains %q, want %q", got, want)
	}
	must(t, rules.Validate(declared.Generation))
	// As if the manifest was loaded first, and then the files by name.
	filter, nat := declared.Generation[rules.IPv4.Table(rules.Filter)], declared.Generation[rules.IPv4.Table(rules.Nat)]
	if got := jumps(filter, "INPUT"); !strings.HasPrefix(got, "LATER top, SITE top, KUBE-FIREWALL top, ") {
		t.Errorf("jumps of INPUT: %s", got)
	}
	if got := jumps(nat, "POSTROUTING"); got != "KUBE-POSTROUTING top, SITE-NAT bottom" {
		t.Errorf("jumps of POSTROUTING: %s", got)
	}
	if len(nat.DependsOn) != 0 || !slices.Equal(filter.DependsOn, []string{"DOCKER-USER"}) {
		t.Errorf("depends on %q in nat and %q in filter", nat.DependsOn, filter.DependsOn)
	}
	for _, c := range []struct {
		table       rules.TableName
		chain, spec string
		want        string
	}{
		{rules.Filter, "LATER", "-j DOCKER-USER", "rules-dir DIR/r/20.v4:4"},
		{rules.Filter, "INPUT", "-j LATER", "rules-dir DIR/r/20.v4:5"},
		{rules.Nat, "POSTROUTING", "-j SITE-NAT", "rules-dir DIR/r/10.v4:9"},
		{rules.Filter, "KUBE-SERVICES", "-j DROP", "manifest the manifest DIR/m"},
		{rules.Filter, "SITE", "-j RETURN", "rules-dir DIR/r/10.v4:2"}, // the chain's
		{rules.Mangle, "", "", " "},
	} {
		r, err := rules.ParseRule(c.spec)
		if err != nil {
			t.Fatal(err)
		}
		from, where := declared.Origin(rules.IPv4, c.table, c.chain, r)
		if got := strings.ReplaceAll(from+" "+where, dir, "DIR"); got != c.want {
			t.Errorf("%s %s of %s is declared in %q, want %q", c.chain, c.spec, c.table, got, c.want)
		}
	}

	again, err := Load(t.Context(), manifest(filepath.Join(dir, "m")), RulesDir{Dir: filepath.Join(dir, "r"), Families: []rules.Family{rules.IPv4}})
	must(t, err)
	if got := tableid.Of(again.Generation, rules.IPv6); len(got) > 0 {
		t.Errorf("rules of a family that was not asked for: %v", got)
	}
}

func jumps(s rules.Section, chain string) string {
	var all []string
	for _, h := range s.Jumps {
		if h.Chain == chain {
			all = append(all, fmt.Sprint(h.Rule.Target, " ", h.Anchor.Position))
		}
	}
	return strings.Join(all, ", ")
}

func TestClaims(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"m.yaml": service("a", 1), "r/site.v4": site})
	declared, err := Load(t.Context(), manifest(filepath.Join(dir, "m.yaml")), RulesDir{Dir: filepath.Join(dir, "r")})
	must(t, err)
	for chain, want := range map[string]bool{
		"SITE":                      true,
		"SITE-NAT":                  false,
		"KUBE-SERVICES":             true,
		"KUBE-MARK-DROP":            true, // though it is not wanted now
		"KUBE-FIREWALL":             true,
		"KUBE-SVC-ABCDEFGHIJKLM234": true,
		"KUBE-SEP-ABCDEFGHIJKLM234": true,
		"KUBE-SEP-ABCDEFGHIJKLM23":  false,
		"KUBE-SEP-ABCDEFGHIJKLM231": false,
		"KUBE-SVC-abcdefghijklm234": false,
		"KUBE-POD-FW-ABCDEFGHIJKLM": false,
		"KUBE-ROUTER-INPUT":         false,
		"KUBE-IPTABLES-HINT":        false,
		"KUBE-PROXY-CANARY":         false,
		"KUBE-CANARYD-CANARY":       false,
		"INPUT":                     false,
		"":                          false,
	} {
		if got := declared.Claims(chain); got != want {
			t.Errorf("Claims(%q) = %v, want %v", chain, got, want)
		}
	}
	for _, s := range declared.Generation {
		for _, c := range s.Chains {
			if !declared.Claims(c.Name) {
				t.Errorf("chain %s is declared and not claimed", c.Name)
			}
		}
	}
	if (Declared{}).Claims("KUBE-SERVICES") {
		t.Error("nothing claims something")
	}
}

func TestFollow(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"v1/a.yaml": "x"})
	for link, to := range map[string]string{"data": "v1", "a.yaml": "data/../data/a.yaml", "abs": filepath.Join(dir, "a.yaml"), "loop": "loop", "gone": "v2/x"} {
		must(t, os.Symlink(to, filepath.Join(dir, link)))
	}
	for path, want := range map[string]string{
		"v1/a.yaml":  "v1/a.yaml",
		"a.yaml":     "a.yaml data data v1/a.yaml",
		"abs":        "abs a.yaml data data v1/a.yaml",
		"gone":       "gone v2",
		"v3/y/z":     "v3",
		"data/":      "data v1",
		"./v1/../v1": "v1",
	} {
		places, _ := follow(dir + "/" + path)
		var got []string
		for _, p := range places {
			got = append(got, strings.TrimPrefix(filepath.Join(p.folder, p.name), dir+"/"))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s leads through %q, want %q", path, got, want)
		}
	}
	if places, _ := follow(filepath.Join(dir, "loop")); len(places) != maxLinks+1 {
		t.Errorf("a link to itself was followed %d times", len(places))
	}
}

// TestSizesAreBounded: canaryd reads at most 64 MiB of a source, in one file or many.
func TestSizesAreBounded(t *testing.T) {
	large := func(name string, size int64) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		must(t, os.WriteFile(name, nil, 0o644))
		must(t, os.Truncate(name, size)) // it has no blocks on disk
	}
	dir := t.TempDir()
	large(filepath.Join(dir, "one/a.yaml"), maxRead+1)
	large(filepath.Join(dir, "many/a.yaml"), maxRead/2)
	large(filepath.Join(dir, "many/b.yaml"), maxRead/2+1)
	for folder, want := range map[string]string{"one": "one/a.yaml", "many": "many/b.yaml"} {
		_, err := Manifest{Path: filepath.Join(dir, folder)}.files().read()
		if err == nil || err.Error() != filepath.Join(dir, want)+": is too large: canaryd reads at most 64 MiB of a source, all files together" {
			t.Errorf("%s: error %v", folder, err)
		}
	}
	must(t, os.Remove(filepath.Join(dir, "many/b.yaml")))
	if _, err := (Manifest{Path: filepath.Join(dir, "many")}).files().read(); err != nil {
		t.Error(err)
	}
}

// TestLinkToSecretsLeaksNothing: a link in the folder may lead to any file, and an error quotes
// nothing of a file that is not a fragment.
func TestLinkToSecretsLeaksNothing(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"secrets": "hush:$6$salt$hash:19000::\n", "r/site.v4": site})
	must(t, os.Symlink(filepath.Join(dir, "secrets"), filepath.Join(dir, "r/zz.v4")))
	_, err := Load(t.Context(), RulesDir{Dir: filepath.Join(dir, "r")})
	if err == nil || !strings.Contains(err.Error(), "r/zz.v4:1: ") || strings.Contains(err.Error(), "hush") || strings.Contains(err.Error(), "salt") {
		t.Errorf("error %v", err)
	}
}

// TestUnknownKinds: an object whose kind declares nothing is an error of its document, counted
// and shown once. The rest of the file is used.
func TestUnknownKinds(t *testing.T) {
	dir := t.TempDir()
	pod := "apiVersion: v1\nkind: Pod\nmetadata: {namespace: shop, name: p%d}\n"
	text := "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: apps/v1, kind: Deployment, metadata: {namespace: shop, name: web}}\n---\n" + service("a", 1)
	write(t, dir, map[string]string{"all.yaml": text})
	counted := 0
	w := NewWatcher(func(string) { counted++ }, manifest(dir))
	if declared := w.Start(t.Context()); !slices.Equal(services(declared), []string{"a"}) {
		t.Errorf("services %q", services(declared))
	}
	problems := <-w.Problems()
	if len(problems) != 1 || problems[0].Instead != TheRest || problems[0].Where != filepath.Join(dir, "all.yaml")+":1" || !strings.Contains(problems[0].Reason, "Deployment shop/web: is of a kind (apps/v1 Deployment) that declares no rules") || counted != 1 {
		t.Errorf("counted %d, problems: %+v", counted, problems)
	}
	since := problems[0].Since
	for i := range 30 {
		text += "---\n" + fmt.Sprintf(pod, i)
	}
	write(t, dir, map[string]string{"all.yaml": text})
	w.reload(t.Context())
	problems = <-w.Problems()
	if len(problems) != shownDocuments+1 || problems[0].Since != since || counted != shownDocuments || !strings.HasPrefix(problems[shownDocuments].Reason, "11 more objects") {
		t.Errorf("counted %d, %d problems: %+v", counted, len(problems), problems)
	}
	write(t, dir, map[string]string{"all.yaml": service("a", 1)})
	w.reload(t.Context())
	if problems = <-w.Problems(); len(problems) > 0 {
		t.Errorf("problems: %+v", problems)
	}
}
