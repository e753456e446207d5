package reload

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// knownBytes is a BytesSource that knows every rule but those with "unknown", and counts its calls.
type knownBytes struct{ asked int }

func (k *knownBytes) InBytes(f rules.Family, r rules.Rule) (rules.Rule, bool) {
	k.asked++
	return bytesFor(f, r), !strings.Contains(r.Label(), "unknown")
}

func bytesFor(f rules.Family, r rules.Rule) rules.Rule {
	return rules.OpaqueBytes([]byte(f.String()+" "+r.Label()), nil, r.Target, "")
}

// numbered returns a generation of one chain with these numbers' rules.
func numbered(from, to int) rules.Generation {
	var list []rules.Rule
	for i := from; i < to; i++ {
		list = append(list, rule(fmt.Sprintf("-m mark --mark %#x -j RETURN", i)))
	}
	return rules.Generation{v4.Table(rules.Filter): {Chains: []rules.Chain{{Name: "KUBE-A", Rules: list}}}}
}

// lookUp returns which rules of a generation the store has bytes of. Others than its own are an error.
func lookUp(t *testing.T, s *Store, g rules.Generation) (found int) {
	t.Helper()
	for id, section := range g {
		for r := range section.NewRules(rules.Section{}) {
			got, ok := s.LookUpBytes(id.Family, r.Key())
			if want := bytesFor(id.Family, r); ok && got != want {
				t.Errorf("%s has the bytes of %s", r.Label(), got.Label())
			}
			if ok {
				found++
			}
		}
	}
	return found
}

// TestBytesOfRulesAreKept: the next canaryd has the bytes of the rules of the generations that
// were saved, as far as they were known.
func TestBytesOfRulesAreKept(t *testing.T) {
	dir, from := t.TempDir(), &knownBytes{}
	s := openStore(t, dir, here)
	s.KeepBytes(from)
	g := numbered(0, 10)
	section := g[v4.Table(rules.Filter)]
	section.Jumps = []rules.Jump{{Chain: "INPUT", Rule: rule("-j KUBE-A")}}
	opaque := rules.OpaqueBytes([]byte("odd"), nil, "", "it is odd")
	section.Chains = append(section.Chains, rules.Chain{Name: "KUBE-B", Rules: []rules.Rule{rule("-m comment --comment unknown"), opaque}})
	g = g.With(v4.Table(rules.Filter), section)
	must(t, s.Save(Stored{Generation: g}))
	if found := lookUp(t, s, g); found != 11 { // ten and the jump
		t.Errorf("bytes of %d rules, want 11", found)
	}
	asked := from.asked
	longer := g.With(v6.Table(rules.Filter), numbered(0, 3)[v4.Table(rules.Filter)])
	must(t, s.Save(Stored{Generation: longer}))
	if more := from.asked - asked; more != 3 { // those of IPv4 are on disk, or their chain is the same memory
		t.Errorf("the next save asked for %d rules, want 3", more)
	}
	if found := lookUp(t, openStore(t, dir, here), longer); found != 14 {
		t.Errorf("the next canaryd has the bytes of %d rules, want 14", found)
	}
	elsewhere := here
	elsewhere.BootID = "another"
	if found := lookUp(t, openStore(t, dir, elsewhere), longer); found != 0 {
		t.Errorf("after a reboot it has the bytes of %d rules", found)
	}
}

// TestDamagedBytesCostTheirRules: a line that is cut off, changed or put behind another text's
// digest is found out, and the others count.
func TestDamagedBytesCostTheirRules(t *testing.T) {
	g := numbered(0, 10)
	dir := t.TempDir()
	s := openStore(t, dir, here)
	s.KeepBytes(&knownBytes{})
	must(t, s.Save(Stored{Generation: g}))
	whole, err := os.ReadFile(s.bytes.path)
	must(t, err)
	lines := bytes.Split(whole, []byte("\n"))
	for _, tt := range []struct {
		name  string
		text  []byte
		found int
	}{
		{"as it was", whole, 10},
		{"cut off in the last line", whole[:len(whole)-30], 9},
		{"cut off in a digest", whole[:len(whole)-len(lines[10])+5], 9},
		{"other bytes in the last line", append(slices.Clone(whole[:len(whole)-20]), "AAAAAAAAAAAAAAAAAAAA"...), 9},
		{"no head", bytes.Join(lines[1:], []byte("\n")), 0},
		{"another file", []byte("hello\n"), 0},
		{"empty", nil, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			must(t, os.WriteFile(s.bytes.path, tt.text, 0o600))
			damaged := openStore(t, dir, here)
			if found := lookUp(t, damaged, g); found != tt.found {
				t.Errorf("bytes of %d rules, want %d", found, tt.found)
			}
			damaged.KeepBytes(&knownBytes{})
			more := numbered(0, 12)
			must(t, damaged.Save(Stored{Generation: more}))
			if found := lookUp(t, openStore(t, dir, here), more); found != 12 {
				t.Errorf("after the next save: bytes of %d rules, want 12", found)
			}
		})
	}
}

// TestBytesOfEarlierRulesMakeRoom: the file keeps the bytes of earlier generations' rules, the
// newest, and does not grow with each rule that comes and goes. Nor does it exceed its limit.
func TestBytesOfEarlierRulesMakeRoom(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	s.KeepBytes(&knownBytes{})
	const each, times = 500, 20
	for i := range times {
		must(t, s.Save(Stored{Generation: numbered(i*each, (i+1)*each)}))
		if limit := crowdedFrom + 4*each; len(s.bytes.known) > limit {
			t.Fatalf("after %d saves it has %d rules, want %d at most", i+1, len(s.bytes.known), limit)
		}
	}
	s = openStore(t, dir, here)
	if found := lookUp(t, s, numbered((times-1)*each, times*each)); found != each {
		t.Errorf("bytes of %d rules of the last generation, want %d", found, each)
	}
	if found := lookUp(t, s, numbered((times-4)*each, (times-1)*each)); found != 3*each {
		t.Errorf("bytes of %d rules of the three before, want %d", found, 3*each)
	}
	if found := lookUp(t, s, numbered(0, each)); found != 0 {
		t.Errorf("bytes of %d rules of the first, want none", found)
	}
	s.KeepBytes(&knownBytes{})
	s.bytes.limit = 20_000
	must(t, s.Save(Stored{Generation: numbered(0, each)}))
	info, err := os.Stat(s.bytes.path)
	must(t, err)
	if found := lookUp(t, openStore(t, dir, here), numbered(0, each)); info.Size() > s.bytes.limit || found < 50 || found == each {
		t.Errorf("with a limit of %d bytes it has %d, for %d rules", s.bytes.limit, info.Size(), found)
	}
}

// TestAFolderThatIsGoneGetsAllBytes: an administrator who removes the state folder costs no rule
// its bytes.
func TestAFolderThatIsGoneGetsAllBytes(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	s.KeepBytes(&knownBytes{})
	must(t, s.Save(Stored{Generation: numbered(0, 10)}))
	must(t, os.RemoveAll(dir))
	must(t, s.Save(Stored{Generation: numbered(0, 11)}))
	if found := lookUp(t, openStore(t, dir, here), numbered(0, 11)); found != 11 {
		t.Errorf("bytes of %d rules, want 11", found)
	}
}

// FuzzBytesFile: no file makes canaryd write bytes that its digests do not name, or fail.
func FuzzBytesFile(f *testing.F) {
	dir := f.TempDir()
	s, err := OpenStore(dir, here)
	if err != nil {
		f.Fatal(err)
	}
	s.KeepBytes(&knownBytes{})
	g := numbered(0, 3)
	if err := s.Save(Stored{Generation: g}); err != nil {
		f.Fatal(err)
	}
	whole, err := os.ReadFile(s.bytes.path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:len(whole)-9])
	f.Fuzz(func(t *testing.T, text []byte) {
		must(t, os.WriteFile(s.bytes.path, text, 0o600))
		s.bytes.scan()
		s.bytes.close()
		for id, section := range g {
			for r := range section.NewRules(rules.Section{}) {
				if held, ok := s.LookUpBytes(id.Family, r.Key()); ok {
					if _, _, _, ok := held.Bytes(); !ok {
						t.Errorf("%q is not what its digest names", held.Spec)
					}
				}
			}
		}
	})
}
