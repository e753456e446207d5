package tableid_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/tableid"
)

func TestFamiliesAreSpeltOneWay(t *testing.T) {
	for _, f := range []tableid.Family{tableid.Inet, tableid.IPv4, tableid.ARP, tableid.Netdev, tableid.Bridge, tableid.IPv6} {
		text, err := f.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var again tableid.Family
		if err := again.UnmarshalText(text); err != nil || again != f {
			t.Errorf("%s is read as %s, %v", text, again, err)
		}
	}
	var f tableid.Family
	for _, bad := range []string{"", "ip", "ipv5", "family 4"} {
		if err := f.UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q is read as a family", bad)
		}
	}
}

func TestAMapWithAnotherValueLeavesTheFirstAlone(t *testing.T) {
	nat, filter := tableid.IPv4.Table("nat"), tableid.IPv6.Table("filter")
	one := tableid.With(map[tableid.TableID]int(nil), nat, 1)
	two := tableid.With(one, filter, 2)
	if diff := cmp.Diff(map[tableid.TableID]int{nat: 1}, one); diff != "" {
		t.Errorf("the first (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[tableid.TableID]int{nat: 1, filter: 2}, two); diff != "" {
		t.Errorf("the second (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]int{"filter": 2}, tableid.Of(two, tableid.IPv6)); diff != "" {
		t.Errorf("one family's (-want +got):\n%s", diff)
	}
}

// TestFilesKeepTheirForm: files in the state folder have families with tables in them. A later
// canaryd must read the files of an earlier one.
func TestFilesKeepTheirForm(t *testing.T) {
	type held struct{ Rules int }
	type section map[tableid.TableID]held
	m := section{tableid.IPv4.Table("nat"): {7}, tableid.IPv4.Table("filter"): {1}, tableid.IPv6.Table("nat"): {2}}
	data, err := tableid.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"ipv4":{"filter":{"Rules":1},"nat":{"Rules":7}},"ipv6":{"nat":{"Rules":2}}}`; string(data) != want {
		t.Errorf("got %s, want %s", data, want)
	}
	var again section
	if err := tableid.Unmarshal(data, &again); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m, again); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, bad := range []string{`{"ipv5":{}}`, `{"ipv4":{"nat":{"Rules":1,"Later":2}}}`, `[]`, `{"ipv4":7}`} {
		if err := tableid.Unmarshal([]byte(bad), &again); err == nil {
			t.Errorf("%s is read", bad)
		}
	}
	if err := json.Unmarshal([]byte("null"), new(section)); err != nil {
		t.Error(err)
	}
}

func ExampleTableID() {
	nat := tableid.IPv4.Table("nat")
	lost := map[tableid.TableID]int{nat: 93}
	fmt.Println(nat, lost[nat], nat.Family.NFT())
	// Output: ipv4 nat 93 ip
}

// TestNamesPrint: the kernel accepts any bytes as a table's name, but programs that show it do
// not.
func TestNamesPrint(t *testing.T) {
	for name, want := range map[string]string{
		"kube-proxy": "ip kube-proxy", "größe": "ip größe", "\xff": `ip "\xff"`, "x\nMAINPID=1": `ip "x\nMAINPID=1"`, "\x1b[2J": `ip "\x1b[2J"`,
	} {
		if got := tableid.IPv4.Table(name).NFT(); got != want {
			t.Errorf("%q is %s, want %s", name, got, want)
		}
	}
}
