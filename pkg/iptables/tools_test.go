package iptables

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestLookUpAndBackendOf(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for name, text := range map[string]string{
		"tool-nft": "iptables v1.8.9 (nf_tables)", "tool-legacy": "iptables v1.8.9 (legacy)", "tool-old": "iptables v1.6.1",
	} {
		script := "#!/bin/sh\necho '" + text + "'\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]Backend{"tool-nft": NFT, "tool-legacy": Legacy, "tool-old": Legacy} {
		path := lookUp(name)
		if path != filepath.Join(dir, name) {
			t.Errorf("lookUp(%s) = %q", name, path)
		}
		if got := backendOf(t.Context(), path); got != want {
			t.Errorf("backendOf(%s) = %q, want %q", name, got, want)
		}
	}
	if got := lookUp("no-such-tool"); got != "" {
		t.Errorf("a missing tool is found at %q", got)
	}
	if got := backendOf(t.Context(), "/no/such/tool"); got != "" {
		t.Errorf("a missing tool serves %q", got)
	}
}

func TestCheckVersion(t *testing.T) {
	for _, c := range []struct {
		backend Backend
		version version
		want    string
	}{
		{Legacy, version{1, 8, 6}, "<nil>"},
		{Legacy, version{2, 0, 0}, "<nil>"},
		{NFT, version{1, 8, 2}, "<nil>"},
		{Legacy, version{1, 8, 5}, "iptables-legacy 1.8.5 cannot move its lock (XTABLES_LOCKFILE): upgrade iptables to 1.8.6 or later"},
		{Legacy, version{1, 6, 9}, "iptables-legacy 1.6.9 cannot move its lock (XTABLES_LOCKFILE): upgrade iptables to 1.8.6 or later"},
	} {
		if diff := cmp.Diff(c.want, fmt.Sprint(checkVersion(c.backend, c.version))); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestOpenWithoutPrivileges(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		dropNetAdmin(t)
		_, err := Open(t.Context(), Config{})
		if !errors.Is(err, nft.ErrPermission) {
			t.Errorf("Open returns %v, want ErrPermission", err)
		}
		t.Log(err)
		for _, family := range rules.Families() {
			if _, err := openXT(family); !errors.Is(err, nft.ErrPermission) {
				t.Errorf("legacy %v: %v, want ErrPermission", family, err)
			}
		}
	})
}

func TestFindToolsMissing(t *testing.T) {
	_, err := findTools(t.Context(), "fancy", rules.IPv6)
	want := `ip6tables-fancy is not installed: install the package "iptables" (Fedora: "iptables-legacy")`
	if diff := cmp.Diff(want, fmt.Sprint(err)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// onlyPrograms makes a machine whose /usr/sbin has only the test's programs.
func onlyPrograms(t *testing.T, names map[string]string) {
	t.Helper()
	content := map[string][]byte{}
	for name, original := range names {
		data, err := os.ReadFile(lookUp(original))
		if err != nil {
			t.Fatal(err)
		}
		content[name] = data
	}
	t.Setenv("PATH", "")
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
			t.Fatal(err)
		}
		for name, data := range content {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestOpenPrograms(t *testing.T) {
	v4 := func(backend Backend) map[string]string {
		all := map[string]string{}
		for _, suffix := range []string{"", "-save", "-restore"} {
			name := program(backend, rules.IPv4, suffix)
			all[name] = name
		}
		return all
	}
	for _, c := range []struct {
		name     string
		programs map[string]string
		cfg      Config
		families []rules.Family
		disabled string // the reason why IPv6 is disabled
		err      string
	}{
		{name: "none", cfg: Config{Backend: NFT}, families: rules.Families()},
		{name: "none, and text is to be replayed", cfg: Config{Backend: NFT, Replay: ReplayText},
			err: `a replay by text needs iptables: iptables-nft is not installed: install the package "iptables" (Fedora, RHEL: "iptables-nft")`},
		{name: "other backend's", cfg: Config{Backend: Legacy}, programs: v4(NFT),
			err: `cannot use the legacy backend: iptables-legacy is not installed: install the package "iptables" (Fedora: "iptables-legacy"); ip6tables-legacy is not installed: install the package "iptables" (Fedora: "iptables-legacy")`},
		{name: "no ip6tables", programs: v4(NFT), families: rules.Families()},
		{name: "nothing there and only legacy is installed", programs: v4(Legacy), families: []rules.Family{rules.IPv4},
			disabled: `this IP family is not available: ipv6: ip6tables-legacy is not installed: install the package "iptables" (Fedora: "iptables-legacy")`},
		{name: "plain names", cfg: Config{Families: []rules.Family{rules.IPv4}}, families: []rules.Family{rules.IPv4},
			programs: map[string]string{"iptables": "iptables-nft", "iptables-save": "iptables-nft-save", "iptables-restore": "iptables-nft-restore"}},
		{name: "plain names of the other backend", cfg: Config{Backend: Legacy, Families: []rules.Family{rules.IPv4}},
			programs: map[string]string{"iptables": "iptables-nft", "iptables-save": "iptables-nft-save", "iptables-restore": "iptables-nft-restore"},
			err:      `cannot use the legacy backend: iptables-legacy is not installed: install the package "iptables" (Fedora: "iptables-legacy")`},
	} {
		t.Run(c.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				onlyPrograms(t, c.programs)
				k, err := Open(t.Context(), c.cfg)
				got := ""
				if err != nil {
					got = err.Error()
				}
				if diff := cmp.Diff(c.err, got); diff != "" {
					t.Errorf("error (-want +got):\n%s", diff)
				}
				if err != nil {
					return
				}
				defer k.Close()
				if diff := cmp.Diff(c.families, k.Families()); diff != "" {
					t.Errorf("families (-want +got):\n%s", diff)
				}
				why := ""
				if err := k.Disabled()[rules.IPv6]; err != nil {
					why = err.Error()
				}
				if diff := cmp.Diff(c.disabled, why); diff != "" {
					t.Errorf("disabled (-want +got):\n%s", diff)
				}
				mustRead(t, k, rules.IPv4)
			})
		})
	}
}
