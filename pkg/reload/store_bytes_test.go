package reload

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/nft/nfttest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// knownBytes is a RawSource that knows every rule except rules with "unknown", and counts its
// calls.
type knownBytes struct{ asked int }

func (k *knownBytes) RawRule(f rules.Family, r rules.Rule, room []byte) (iptables.RawRule, bool) {
	k.asked++
	return iptables.RawRule{Text: r.Spec, Bytes: append(room[:0], f.String()+" "+r.Spec...)}, !r.Mentions("unknown")
}

// numbered returns a generation with one chain, which has a rule for each of these numbers.
func numbered(from, to int) rules.Generation {
	var list []rules.Rule
	for i := from; i < to; i++ {
		list = append(list, rule(fmt.Sprintf("-m mark --mark %#x -j RETURN", i)))
	}
	return rules.Generation{v4.Table(rules.Filter): {Chains: []rules.Chain{{Name: "KUBE-A", Rules: list}}}}
}

// saveBoth saves a generation and the bytes of its rules.
func saveBoth(s *Store, g rules.Generation) error {
	return errors.Join(s.Save(Stored{Generation: g}), s.SaveBytes(g))
}

// lookUp returns how many rules of a generation have their bytes in the store. Bytes of another
// rule are an error.
func lookUp(t *testing.T, s *Store, g rules.Generation) (found int) {
	t.Helper()
	for f := range map[rules.Family]bool{v4: true, v6: true} {
		wanted := map[string]bool{}
		for id, section := range g {
			for r := range section.NewRules(rules.Section{}) {
				wanted[r.Spec] = wanted[r.Spec] || id.Family == f
			}
		}
		s.Earlier(f, func(raw iptables.RawRule) {
			if got := string(raw.Bytes); got != f.String()+" "+raw.Text {
				t.Errorf("%s has the bytes %s", raw.Text, got)
			}
			if wanted[raw.Text] {
				found++
			}
		})
	}
	return found
}

// TestBytesOfRulesAreKept: the next canaryd has the bytes of the saved generations' rules, as far
// as they were known.
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
	must(t, saveBoth(s, g))
	if found := lookUp(t, s, g); found != 11 { // ten and the jump
		t.Errorf("bytes of %d rules, want 11", found)
	}
	asked := from.asked
	longer := g.With(v6.Table(rules.Filter), numbered(0, 3)[v4.Table(rules.Filter)])
	must(t, saveBoth(s, longer))
	if more := from.asked - asked; more != 4 { // three new rules, and the jump: IPv4's chains are the same memory
		t.Errorf("the next save asked for %d rules, want 4", more)
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

// TestOpaqueRulesOfAnEarlierVersionAreReadAnew: this version has words for bytes that an earlier
// version saved. The loaded generation and quarantine have these words, like a read. On legacy
// earlier versions saved the bytes of an entry without its verdict.
func TestOpaqueRulesOfAnEarlierVersionAreReadAnew(t *testing.T) {
	match := nft.AppendAttr(nil, unix.NFTA_MATCH_NAME, "comment", 1)
	match = nft.AppendAttr(match, unix.NFTA_MATCH_REV, make([]byte, 4), 0)
	match = nft.AppendAttr(match, unix.NFTA_MATCH_INFO, nfttest.CommentInfo("hi"), 0)
	counter := nft.AppendAttr(nil, unix.NFTA_COUNTER_BYTES, make([]byte, 8), 0)
	counter = nft.AppendAttr(counter, unix.NFTA_COUNTER_PACKETS, make([]byte, 8), 0)
	var expressions []byte
	for _, e := range []nft.Expression{{Name: "match", Data: match}, {Name: "counter", Data: counter}} {
		one := nft.AppendAttr(nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, e.Name, 1), unix.NFTA_EXPR_DATA, e.Data, 0)
		expressions = nft.AppendAttr(expressions, unix.NFTA_LIST_ELEM, one, 0)
	}
	held := rules.OpaqueBytes(expressions, nil, "", "an earlier version had no words")
	const entrySize, matchSize, headSize = 112, 32 + 256, 32 // of IPv4
	entry := make([]byte, entrySize+matchSize+headSize)
	binary.NativeEndian.PutUint16(entry[88:], entrySize+matchSize)
	binary.NativeEndian.PutUint16(entry[90:], entrySize+matchSize+headSize+8)
	binary.NativeEndian.PutUint16(entry[entrySize:], matchSize)
	copy(entry[entrySize+2:], "comment")
	copy(entry[entrySize+32:], "hi")
	binary.NativeEndian.PutUint16(entry[entrySize+matchSize:], headSize+8)
	filter := v4.Table(rules.Filter)
	for backend, rows := range map[iptables.Backend][2]rules.Rule{
		iptables.NFT:    {held, rule("-m comment --comment hi")},
		iptables.Legacy: {rules.OpaqueBytes(entry, []byte("ACCEPT"), "ACCEPT", "an earlier version had no words"), rule("-m comment --comment hi -j ACCEPT")},
	} {
		held, want := rows[0], rows[1]
		there, dir := here, t.TempDir()
		there.Backend = string(backend)
		g := rules.Generation{filter: {Chains: []rules.Chain{{Name: "KUBE-A", Rules: []rules.Rule{rule("-j RETURN"), held}}}}}
		s := openStore(t, dir, there)
		must(t, s.Save(Stored{Generation: g}))
		must(t, s.SaveState(State{Quarantine: Quarantine{filter: {{Chain: "KUBE-A", Rule: held}}}}))
		state, stored, err := openStore(t, dir, there).LoadState()
		must(t, err)
		if got := stored.Generation[filter].Chains[0].Rules[1]; got != want {
			t.Errorf("%s: the rule is %v", backend, got)
		}
		if got := state.Quarantine[filter][0].Rule; got != want {
			t.Errorf("%s: the rule in quarantine is %v", backend, got)
		}
	}
}

// TestDamagedBytesCostTheirRules: a member of the file that is cut off or changed ends the file.
// The rules before it count, and the next save writes the file again.
func TestDamagedBytesCostTheirRules(t *testing.T) {
	g := numbered(0, 10)
	dir := t.TempDir()
	s := openStore(t, dir, here)
	s.KeepBytes(&knownBytes{})
	must(t, saveBoth(s, g))
	whole, err := os.ReadFile(s.bytes.path)
	must(t, err)
	for i := range 3 { // each save adds a member
		must(t, saveBoth(s, numbered(0, 11+i)))
	}
	all, err := os.ReadFile(s.bytes.path)
	must(t, err)
	changed := slices.Clone(all)
	changed[len(whole)+20] ^= 1
	for _, tt := range []struct {
		name  string
		text  []byte
		found int
	}{
		{"as it was", all, 13},
		{"cut off in the last member", all[:len(all)-5], 12},
		{"cut off in the first", whole[:len(whole)-5], 0},
		{"a changed byte in the second", changed, 10},
		{"another file", []byte("hello\n"), 0},
		{"empty", nil, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			must(t, os.WriteFile(s.bytes.path, tt.text, 0o600))
			damaged := openStore(t, dir, here)
			if found := lookUp(t, damaged, numbered(0, 13)); found < tt.found || found > 13 {
				t.Errorf("bytes of %d rules, want %d at least", found, tt.found)
			}
			damaged.KeepBytes(&knownBytes{})
			more := numbered(0, 14)
			must(t, saveBoth(damaged, more))
			if found := lookUp(t, openStore(t, dir, here), more); found != 14 {
				t.Errorf("after the next save: bytes of %d rules, want 14", found)
			}
		})
	}
}

// TestBytesOfEarlierRulesMakeRoom: the file keeps the newest bytes of earlier generations' rules.
// It does not grow with each rule that is added and removed, and does not exceed its limit.
func TestBytesOfEarlierRulesMakeRoom(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	s.KeepBytes(&knownBytes{})
	const each, times = 500, 20
	for i := range times {
		must(t, saveBoth(s, numbered(i*each, (i+1)*each)))
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
}

// TestAFolderThatIsGoneGetsAllBytes: after an administrator removes the state folder, the next save
// writes all bytes.
func TestAFolderThatIsGoneGetsAllBytes(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	s.KeepBytes(&knownBytes{})
	must(t, saveBoth(s, numbered(0, 10)))
	must(t, os.RemoveAll(dir))
	must(t, saveBoth(s, numbered(0, 11)))
	if found := lookUp(t, openStore(t, dir, here), numbered(0, 11)); found != 11 {
		t.Errorf("bytes of %d rules, want 11", found)
	}
}

// TestBytesThatFailAreWrittenLater: there is no room for the bytes of rules. The generation and the
// state are saved, and the next try with the same generation writes the bytes.
func TestBytesThatFailAreWrittenLater(t *testing.T) {
	for _, tt := range []struct {
		name        string
		before      func(t *testing.T, s *Store) // a first generation, or none
		block, free func(t *testing.T, s *Store)
	}{
		{
			"the first bytes", func(*testing.T, *Store) {},
			func(t *testing.T, s *Store) { must(t, os.MkdirAll(s.bytes.path+"/in the way", 0o700)) },
			func(t *testing.T, s *Store) { must(t, os.RemoveAll(s.bytes.path)) },
		},
		{
			"more bytes", func(t *testing.T, s *Store) { must(t, saveBoth(s, numbered(0, 5))) },
			func(t *testing.T, s *Store) { // the file cannot be opened, and its size is as it was
				must(t, os.Rename(s.bytes.path, s.bytes.path+".real"))
				must(t, os.Symlink(s.bytes.path+".real", s.bytes.path))
			},
			func(t *testing.T, s *Store) { must(t, os.Rename(s.bytes.path+".real", s.bytes.path)) },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s := openStore(t, dir, here)
			s.KeepBytes(&knownBytes{})
			tt.before(t, s)
			g := numbered(0, 10)
			tt.block(t, s)
			must(t, s.Save(Stored{Generation: g}))
			must(t, s.SaveState(State{}))
			if s.SaveBytes(g) == nil {
				t.Fatal("no error")
			}
			if _, stored, err := openStore(t, dir, here).LoadState(); err != nil || stored.ID != g.ID() {
				t.Errorf("the next canaryd loads %q: %v", stored.ID, err)
			}
			tt.free(t, s)
			must(t, saveBoth(s, g))
			if found := lookUp(t, openStore(t, dir, here), g); found != 10 {
				t.Errorf("bytes of %d rules, want 10", found)
			}
		})
	}
}

// TestBytesOfAResumedGeneration: an older canaryd kept no bytes of a generation. The next one
// resumes it and writes them, although the generation does not change.
func TestBytesOfAResumedGeneration(t *testing.T) {
	dir, g := t.TempDir(), numbered(0, 10)
	must(t, saveBoth(openStore(t, dir, here), g))
	s := openStore(t, dir, here)
	s.KeepBytes(&knownBytes{})
	s.Resume(g.ID())
	must(t, saveBoth(s, g))
	if found := lookUp(t, openStore(t, dir, here), g); found != 10 {
		t.Errorf("bytes of %d rules, want 10", found)
	}
}

// TestBytesOfTooManyRules: a file with more rules than the limit is not read to its end.
func TestBytesOfTooManyRules(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	file, err := os.Create(s.bytes.path)
	must(t, err)
	buffered := bufio.NewWriter(file)
	member, err := gzip.NewWriterLevel(buffered, gzip.BestSpeed)
	must(t, err)
	must(t, json.NewEncoder(member).Encode(byteFileHead{everywhere, here}))
	_, err = member.Write(make([]byte, 3*mostRecords+3)) // a family, no text, no bytes
	must(t, errors.Join(err, member.Close(), buffered.Flush(), file.Close()))
	if s.bytes.scan(); s.bytes.size != 0 || len(s.bytes.known) > mostRecords {
		t.Errorf("it is read as a file of %d bytes with %d rules", s.bytes.size, len(s.bytes.known))
	}
}

// FuzzBytesFile: a file with any content is read within its limits, and a save repairs it.
func FuzzBytesFile(f *testing.F) {
	dir := f.TempDir()
	s, err := OpenStore(dir, here)
	if err != nil {
		f.Fatal(err)
	}
	s.KeepBytes(&knownBytes{})
	g := numbered(0, 3)
	if err := saveBoth(s, g); err != nil {
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
		s.Earlier(v4, func(raw iptables.RawRule) {
			if len(raw.Text) > mostRecord || len(raw.Bytes) > mostRecord {
				t.Errorf("a rule with a text of %d bytes, and %d bytes", len(raw.Text), len(raw.Bytes))
			}
		})
		must(t, s.bytes.save(g, &knownBytes{}))
		if found := lookUp(t, s, g); found < 3 {
			t.Errorf("after a save: bytes of %d rules, want 3", found)
		}
	})
}
