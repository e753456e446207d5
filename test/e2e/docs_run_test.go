package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// root is the repository, from this package.
const root = "../../"

// documents are all documents for users, by their paths in the repository.
func documents(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"*.md", "docs/*.md", "deploy/*.md", "deploy/*/*.md", "deploy/*/*/*.md"} {
		found, err := filepath.Glob(root + pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			all = append(all, strings.TrimPrefix(path, root))
		}
	}
	slices.Sort(all)
	return all
}

// This pattern finds commands within a sentence. It leaves out iptables and nft,
// because sentences name them as actions of others.
var told = regexp.MustCompile("`((?:canaryd|make|systemctl|dpkg|kubectl|promtool) [^`]+)`")

// A docCommand is a line that a document's reader is to type.
type docCommand struct {
	path string
	line int
	text string
}

func (c docCommand) String() string { return fmt.Sprintf("%s:%d: %s", c.path, c.line, c.text) }

// words returns the words of the command, without a comment after it.
func (c docCommand) words() []string {
	text, _, _ := strings.Cut(c.text, " # ")
	return strings.Fields(text)
}

// commandsIn returns the commands of a document. These are each line of a block
// that is fenced as sh, and commands of canaryd and others between single
// backquotes. In an indented block they are each line after a "$ ", or all lines
// if the first begins with a program's name. Other blocks show output, files and
// drawings.
func commandsIn(path, text string) []docCommand {
	var all []docCommand
	var fence string
	text = strings.ReplaceAll(text, "\\\n", "") // joins continued lines
	before, block := "", ""                     // the previous line; the indented block: "", "shell", "other"
	for i, line := range strings.Split(text, "\n") {
		add := func(command string) {
			if command = strings.TrimSpace(command); command != "" && !strings.HasPrefix(command, "#") {
				all = append(all, docCommand{path, i + 1, command})
			}
		}
		indented := strings.HasPrefix(line, "    ")
		switch {
		case strings.HasPrefix(line, "```"):
			if fence == "" {
				fence = strings.TrimPrefix(line, "```") + "."
			} else {
				fence = ""
			}
		case fence == "sh.":
			add(line)
		case fence != "":
		case indented && (before == "" || block != ""):
			if block == "" {
				block = "other"
				word := strings.Fields(line)[0]
				if _, err := exec.LookPath(word); err == nil || word == "$" || known[word] != "" {
					block = "shell"
				}
			}
			if command, prompted := strings.CutPrefix(strings.TrimSpace(line), "$ "); prompted {
				add(command)
				block = "other" // its output follows
			} else if block == "shell" {
				add(line)
			}
		default:
			if line != "" {
				block = ""
			}
			for _, span := range told.FindAllStringSubmatch(line, -1) {
				add(span[1])
			}
		}
		before = line
	}
	return all
}

// known are the programs that documents may name in commands, with the way in
// which they are tested here.
var known = map[string]string{
	"canaryd":    "run",
	"iptables":   "run",
	"make":       "planned by make --dry-run: CI itself is make, and the others take minutes",
	"systemctl":  "units checked: test/packaging runs them under a systemd of its own",
	"dpkg":       "not run: test/packaging installs, upgrades, removes and purges the package",
	"echo":       "not run: test/packaging writes that file before it installs the package",
	"podman":     "not run: there is no engine here; test/packaging runs the image's files with these rights and mounts",
	"kubectl":    "paths checked, what is executed in the pod is run: there is no cluster here; test/kubernetes builds what is applied",
	"sha256sum":  "not run: test/packaging does, on a release",
	"ssh-keygen": "not run: test/packaging does, with a key of its own",
	"skopeo":     "not run: there is no registry here",
	"ctr":        "not run: test/packaging loads the image with it",
	"helm":       "not run: test/kubernetes renders the chart with Helm's own library",
	"promtool":   "not run: test/alerts does",
	"cd":         "not run: these tests are in the clone",
	"git":        "not run: there is no network here; CI runs make in a fresh clone, test/packaging signs and verifies a tag",
}

// TestDocumentsPrograms: TestDocumentsCommands must run each command that a
// document's reader is to type, or known has a reason against it. Then the test
// checks as much of the command as possible.
func TestDocumentsPrograms(t *testing.T) {
	t.Parallel()
	makefile := document(t, "Makefile")
	seen, checked := map[string]int{}, map[string]bool{}
	for _, path := range documents(t) {
		for _, c := range commandsIn(path, document(t, path)) {
			seen[c.words()[0]]++
			if text := strings.Join(c.words(), " "); !checked[text] {
				checkDocCommand(t, c, makefile)
				checked[text] = true
			}
		}
	}
	for program, what := range known {
		t.Logf("%3d × %s: %s", seen[program], program, what)
		if seen[program] == 0 {
			t.Errorf("no document names %s any more", program)
		}
	}
}

// TestDocumentsCommands runs the documents' commands, each document's on a node
// of its own, next to a running canaryd. If several documents have a command, it
// is run for the first of them.
func TestDocumentsCommands(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{"": true}
	for _, path := range documents(t) {
		commands := slices.DeleteFunc(commandsIn(path, document(t, path)), func(c docCommand) bool {
			text := runnable(c)
			defer func() { seen[text] = true }()
			return seen[text]
		})
		if len(commands) > 0 {
			t.Run(strings.ReplaceAll(path, "/", "_"), func(t *testing.T) { runDocCommands(t, commands) })
		}
	}
}

// checkDocCommand checks a command without running it.
func checkDocCommand(t *testing.T, c docCommand, makefile string) {
	t.Helper()
	words := c.words()
	if known[words[0]] == "" {
		t.Errorf("%s: %s is neither run nor on the list of what cannot be run here (known, in this file)", c, words[0])
	}
	for _, word := range words[1:] {
		if regexp.MustCompile(`^(\./)?(deploy|docs|hack|test)/`).MatchString(word) {
			if _, err := os.Stat(root + word); err != nil {
				t.Errorf("%s: %v", c, err)
			}
		}
		if path, is := strings.CutPrefix(word, "bin/canaryd_"); is && !strings.Contains(makefile, "bin/canaryd_$(VERSION)") {
			t.Errorf("%s: the Makefile makes no %s", c, path)
		}
	}
	switch words[0] {
	case "make":
		text, _, _ := strings.Cut(c.text, " # ")
		plan := exec.Command("sh", "-c", text+" --dry-run --directory="+root)
		if out, err := plan.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", c, err, out)
		}
	case "systemctl":
		for _, word := range words[2:] {
			if !strings.HasPrefix(word, "-") && word != "canaryd" && word != "fail2ban" && !strings.Contains(document(t, "deploy/systemd/canaryd.service"), word+".service") {
				t.Errorf("%s: %s is no unit that canaryd's knows", c, word)
			}
		}
	}
}

// runnable returns the part of a command that is run here; "" if there is none.
func runnable(c docCommand) string {
	text, _, _ := strings.Cut(c.text, " # ")
	words := strings.Fields(text)
	switch {
	case words[0] == "kubectl" && slices.Contains(words, "--"):
		_, inside, _ := strings.Cut(text, " -- ")
		return inside
	case len(words) > 1 && (words[1] == "COMMAND" || words[1] == "run") && words[0] == "canaryd":
		return "canaryd --help"
	case slices.Contains(words, "--watch"): // it ends with Ctrl-C only; without --foreground it gets two
		return "timeout --foreground --preserve-status --signal=INT 3 " + text
	case slices.Contains(words, "--stay"): // it ends with SIGTERM only
		return "timeout --preserve-status 10 " + text
	case known[words[0]] == "run":
		return text
	}
	return ""
}

// placeholders replaces the words that the documents' reader has to fill in.
func placeholders(id string) *strings.Replacer {
	return strings.NewReplacer("--generation ID", "--generation "+id, "--manifest PATH", "--manifest cluster.yaml", "--flush N", "--flush 1", "--rules-dir /etc/canaryd/rules", "--rules-dir rules")
}

func runDocCommands(t *testing.T, commands []docCommand) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		// The machine chooses the backend of "iptables"; here it is the node's.
		n.Must(os.MkdirAll("/run/bin", 0o755))
		for _, name := range []string{"iptables", "iptables-restore"} {
			path, err := exec.LookPath(strings.Replace(name, "iptables", "iptables-nft", 1))
			n.Must(err)
			n.Must(os.Symlink(path, "/run/bin/"+name))
		}
		n.Must(os.Symlink(nodetest.Canaryd(), "/run/bin/canaryd"))
		n.Must(os.MkdirAll("/run/here", 0o755))
		n.Must(os.WriteFile("/run/here/cluster.yaml", []byte(manifest("10.1.0.5", "fd00:10::5")), 0o644))
		n.Must(os.MkdirAll("/run/here/rules", 0o755))
		n.Must(os.WriteFile("/run/here/rules/site.v4", []byte("*filter\n:SITE - [0:0]\n-A SITE -j RETURN\n-A INPUT -j SITE\nCOMMIT\n"), 0o644))

		d := n.Start()
		n.Flush() // so that there is something to report
		n.Healed(1)
		var id string
		n.Until("the generation to reach the disk", func() error {
			if id = n.Status().Generation.ID; !slices.Contains(n.Stored(), id) {
				return os.ErrNotExist
			}
			return nil
		})
		last := func(c docCommand) int { // commands that end the daemon's work
			switch text := runnable(c); {
			case strings.Contains(text, "cleanup"):
				return 2
			case strings.Contains(text, "| iptables-restore"):
				return 1
			default:
				return 0
			}
		}
		slices.SortStableFunc(commands, func(a, b docCommand) int { return last(a) - last(b) })
		ran := map[string]bool{}
		for _, c := range commands {
			text := placeholders(id).Replace(runnable(c))
			if ran[text] {
				continue
			}
			ran[text] = true
			if last(c) == 0 && strings.HasPrefix(text, "canaryd ") && !strings.Contains(text, "pause") && !strings.Contains(text, "resume") {
				n.Until("all to be well before "+c.String(), func() error { return wellOrPaused(n) })
			}
			code, stdout, stderr := n.Exec(docShell(n, text))
			if code != 0 {
				n.Errorf("%s: exit code %d\n%s%s", c, code, stdout, stderr)
			}
			if strings.HasPrefix(text, "canaryd pause") {
				n.Want(0, "resume")
			}
		}
		d.Stop()
	})
}

// wellOrPaused returns nil once every table is intact.
func wellOrPaused(n *nodetest.Node) error {
	if err := nodetest.Ready(); err != nil {
		return err
	}
	if s := n.Status(); !s.Healthy {
		return fmt.Errorf("not healthy: %+v", s)
	}
	return nil
}

func docShell(n *nodetest.Node, text string) *exec.Cmd {
	cmd := exec.CommandContext(n.Context(), "sh", "-euc", text)
	cmd.Dir = "/run/here"
	cmd.Env = append(os.Environ(), "PATH=/run/bin:"+os.Getenv("PATH"))
	cmd.WaitDelay = time.Second
	return cmd
}

// TestDocumentsIndex: a reader who begins at docs/README.md must find every
// document.
func TestDocumentsIndex(t *testing.T) {
	t.Parallel()
	index := document(t, "docs/README.md")
	for _, path := range documents(t) {
		link, err := filepath.Rel("docs", path)
		if err != nil {
			t.Fatal(err)
		}
		if path != "docs/README.md" && path != "README.md" && !strings.Contains(index, "]("+link+")") {
			t.Errorf("docs/README.md does not link to %s", path)
		}
	}
}

// TestDocumentsLinks: each file and each heading that a document links to must
// exist.
func TestDocumentsLinks(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for _, path := range documents(t) {
		for _, found := range link.FindAllStringSubmatch(document(t, path), -1) {
			target, heading, _ := strings.Cut(found[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			file := path
			if target != "" {
				file = filepath.Join(filepath.Dir(path), target)
			}
			if _, err := os.Stat(root + file); err != nil {
				t.Errorf("%s links to what is not there: %v", path, err)
				continue
			}
			if heading != "" && !slices.Contains(anchors(document(t, file)), heading) {
				t.Errorf("%s links to %s, where no heading is #%s", path, file, heading)
			}
		}
	}
}

// anchors are the names that GitHub gives to a document's headings.
func anchors(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		if heading, is := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); is && strings.HasPrefix(line, "#") {
			name := strings.ReplaceAll(strings.ToLower(strings.TrimSpace(heading)), " ", "-")
			all = append(all, regexp.MustCompile(`[^\w-]`).ReplaceAllString(name, ""))
		}
	}
	return all
}

// TestDocumentsFlags: each flag in a document must be canaryd's, or in this list
// with its program. Each flag of canaryd must be in the manual.
func TestDocumentsFlags(t *testing.T) {
	t.Parallel()
	others := map[string]string{
		"--noflush": "iptables-restore", "--match-set": "iptables", "--modprobe": "iptables", "--test": "iptables-restore", "--or-mark": "iptables", "--set-xmark": "iptables", "--dport": "iptables", "--sport": "iptables", "--random-fully": "iptables",
		"--cleanup": "kube-proxy", "--iptables-min-sync-period": "kube-proxy", "--user": "systemctl", "--port": "systemd-nspawn",
		"--now": "systemctl", "--display": "update-alternatives", "--reload": "firewall-cmd", "--complete-reload": "firewall-cmd",
		"--config": "node-problem-detector", "--type": "kubectl", "--patch-file": "kubectl", "--context": "kubectl", "--kubeconfig": "kubectl", "--as": "kubectl", "--values": "helm", "--reuse-values": "helm", "--namespace": "helm", "--selinux": "k3s and rke2",
	}
	help := ""
	for _, name := range commandNames {
		out, err := exec.Command(nodetest.Canaryd(), name, "--help").Output()
		if err != nil {
			t.Fatalf("canaryd %s --help: %v", name, err)
		}
		help += string(out)
	}
	manual := strings.ReplaceAll(document(t, "docs/canaryd.8"), `\-`, "-")
	help += manual // the manual also has run's rare flags
	flag := regexp.MustCompile(`(?:^|[\s` + "`" + `"'(=])(--[a-z][a-z-]+)`)
	for _, found := range flag.FindAllStringSubmatch(document(t, "cmd/kubectl-canaryd/testdata/help.golden"), -1) {
		others[found[1]] = "kubectl canaryd"
	}
	ours := map[string]bool{"--help": true, "--version": true}
	for _, found := range flag.FindAllStringSubmatch(help, -1) {
		ours[found[1]] = true
	}
	for _, path := range documents(t) {
		text := strings.ReplaceAll(document(t, path), "\\\n", "")
		lines := strings.Split(text, "\n")
		for _, c := range commandsIn(path, text) {
			if program := c.words()[0]; program != "canaryd" && strings.HasPrefix(strings.TrimSpace(lines[c.line-1]), program) {
				lines[c.line-1] = "" // its flags belong to the example
			}
		}
		for _, found := range flag.FindAllStringSubmatch(strings.Join(lines, "\n"), -1) {
			if !ours[found[1]] && others[found[1]] == "" {
				t.Errorf("%s names %s, which canaryd does not have (nor is it listed with another program)", path, found[1])
			}
		}
	}
	for name := range ours {
		if !strings.Contains(manual, name) && name != "--help" && name != "--version" {
			t.Errorf("canaryd(8) lacks %s", name)
		}
	}
}
