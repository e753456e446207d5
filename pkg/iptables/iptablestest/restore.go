package iptablestest

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A run is one run of iptables-restore.
type run struct {
	f       *Fake
	family  rules.Family
	noflush bool
	by      nft.Commit    // without Genid
	lock    func() func() // takes the xtables lock for one table; returns its release
	failAt  int           // the table, counted from 1, that is refused; 0 is none
	commits int           // the number of changed tables
}

// run executes text table by table, as the program does. It writes a table at its COMMIT, and
// ends at the first error.
func (r *run) run(text string) error {
	if !r.f.has(r.family) {
		return iptables.ErrNoFamily
	}
	var body []command
	var table rules.TableName
	var unlock func()
	defer func() {
		if unlock != nil {
			unlock()
		}
	}()
	line, tables := 0, 0
	for raw := range strings.Lines(text) {
		line++
		raw = strings.TrimSuffix(strings.TrimSuffix(raw, "\n"), "\r")
		switch {
		case strings.TrimSpace(raw) == "" || raw[0] == '#':
		case raw[0] == '*' && unlock == nil:
			table = rules.TableName(strings.TrimSpace(raw[1:]))
			if !slices.Contains(rules.AllTables(), table) {
				return r.noTable(line, table)
			}
			unlock, body = r.lock(), nil
			r.f.touch(r.family, table)
			tables++
		case unlock == nil:
			return r.failed(line, "")
		case raw == "COMMIT":
			if err := r.commit(table, body, line, tables); err != nil {
				return err
			}
			unlock()
			unlock = nil
		default:
			read, err := readLine(r.family, raw)
			if err != nil {
				return r.badLine(line, err.Error())
			}
			body = append(body, command{read, line})
		}
	}
	if unlock != nil {
		return r.refusal(1, fmt.Sprintf("%s: COMMIT expected at line %d", r.speaker(), line+1))
	}
	return nil
}

// commit applies one table's commands to a copy and publishes it.
func (r *run) commit(table rules.TableName, body []command, line, nth int) error {
	f := r.f
	f.mu.Lock()
	old := f.tables[r.family.Table(table)]
	s := &section{run: r, table: copyOf(orEmpty(old, table)), own: map[string]bool{}, end: line}
	if !r.noflush {
		s.clear(old != nil)
	}
	err := s.all(body)
	if err == nil && nth == r.failAt {
		err = r.kernel(line, "line 1: RULE_APPEND failed (Device or resource busy): injected fault")
	}
	if err != nil || !s.wrote && !s.cleared {
		f.mu.Unlock()
		return err
	}
	if !s.wrote && f.backend() == iptables.NFT {
		s.table = nil // deleted and not replaced
	} else {
		s.table = sorted(s.table)
	}
	announce := f.publish(r.family, map[rules.TableName]*rules.Table{table: s.table}, r.by)
	r.commits++
	f.mu.Unlock()
	announce()
	return nil
}

func orEmpty(t *rules.Table, name rules.TableName) *rules.Table {
	if t == nil {
		return rules.NewTable(name)
	}
	return t
}

// touch creates a legacy table, as its mention does.
func (f *Fake) touch(family rules.Family, table rules.TableName) {
	if f.backend() != iptables.Legacy {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tables[family.Table(table)] != nil {
		return
	}
	t := rules.NewTable(table)
	for _, name := range rules.BuiltinChains(table) {
		t.Add(rules.Chain{Name: name, Policy: "ACCEPT"})
	}
	f.tables[family.Table(table)] = t
}

// publish makes tables the content of family in one commit; it deletes nil ones. It returns a
// function that informs the listeners. Call with the Fake locked.
func (f *Fake) publish(family rules.Family, tables map[rules.TableName]*rules.Table, by nft.Commit) (announce func()) {
	by.Genid = f.genid + 1
	before := maps.Clone(f.tables)
	defer func() { f.keepBefore(by, before) }()
	for name, t := range tables {
		delete(f.sums, f.tables[family.Table(name)])
		if f.backend() == iptables.NFT {
			f.take(by, family, name, f.tables[family.Table(name)], t)
		}
		if t == nil {
			delete(f.tables, family.Table(name))
			continue
		}
		f.tables[family.Table(name)] = t
	}
	if f.backend() == iptables.Legacy {
		return func() {}
	}
	f.genid++
	listeners := slices.Clone(f.onCommit)
	return func() {
		for _, fn := range listeners {
			fn(by)
		}
	}
}

// CommitElsewhere is a commit of canaryd's own to a table that is not iptables'. On nft it only
// moves the genid.
func (f *Fake) CommitElsewhere() {
	f.mu.Lock()
	announce := f.publish(rules.IPv4, nil, nft.Commit{PID: uint32(os.Getpid()), Comm: "canaryd", Own: true})
	f.mu.Unlock()
	announce()
}

// program returns the restore program's name, and speaker the name in its messages.
func (r *run) program() string {
	return fmt.Sprintf("%s-%s-restore", tool(r.family), r.f.backend())
}

func (r *run) speaker() string {
	if r.f.backend() == iptables.NFT {
		return r.program()
	}
	return tool(r.family) + "-restore"
}

func (r *run) versioned() string {
	kind := "legacy"
	if r.f.backend() == iptables.NFT {
		kind = "nf_tables"
	}
	return fmt.Sprintf("%s v1.8.9 (%s):", r.speaker(), kind)
}

func tool(family rules.Family) string {
	if family == rules.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// refusal returns the real Kernel's error for a program's last words.
func (r *run) refusal(exit int, stderr string) *iptables.RestoreError {
	return iptables.Refusal(r.program(), exit, []byte(stderr))
}

// badLine is the refusal of a line by the program itself.
func (r *run) badLine(line int, text string) *iptables.RestoreError {
	if !strings.HasPrefix(text, "Bad argument") { // the only message without a name
		text = r.versioned() + " " + text
	}
	who := r.speaker()
	return r.refusal(2, fmt.Sprintf("%s\nError occurred at line: %d\nTry `%s -h' or '%s --help' for more information.\n", text, line, who, who))
}

func (r *run) noTable(line int, table rules.TableName) *iptables.RestoreError {
	if r.f.backend() == iptables.NFT {
		return r.badLine(line, fmt.Sprintf("%s: line %d table name '%s' invalid", r.speaker(), line, table))
	}
	return r.badLine(line, fmt.Sprintf("%s: unable to initialize table '%s'", r.speaker(), table))
}

// failed is the refusal of an impossible command; only nft names the reason.
func (r *run) failed(line int, why string) *iptables.RestoreError {
	text := fmt.Sprintf("%s: line %d failed", r.speaker(), line)
	if r.f.backend() == iptables.NFT && why != "" {
		text += ": " + why
	}
	return r.refusal(1, text)
}

// kernel is a refusal by the kernel at COMMIT.
func (r *run) kernel(line int, why ...string) *iptables.RestoreError {
	if r.f.backend() == iptables.Legacy {
		return r.failed(line, "")
	}
	return r.refusal(4, r.versioned()+" \n"+strings.Join(why, "\n"))
}

// noTarget is the refusal of a jump to a missing chain.
func (r *run) noTarget(line, end int, rule rules.Rule) *iptables.RestoreError {
	switch {
	case r.f.backend() == iptables.NFT:
		return r.badLine(end, fmt.Sprintf("Chain '%s' does not exist", rule.Target))
	case rule.Goto():
		return r.badLine(line, fmt.Sprintf("goto '%s' is not a chain", rule.Target))
	}
	return r.badLine(line, fmt.Sprintf("Couldn't load target `%s':No such file or directory\n", rule.Target))
}
