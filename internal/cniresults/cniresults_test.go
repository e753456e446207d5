package cniresults

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/protect"
)

var (
	web     = protect.Attachment{Network: "cbr0", Container: "5f1e0c6a2b7d4e89a1c3f5d7b9e1a3c5"}
	gateway = protect.Attachment{Network: "cbr0", Container: "c2d94b1f8e6a47d0b3a5c7e9f1b3d5a7"}
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// results is a copy of files that libcni wrote.
func results(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.CopyFS(dir, os.DirFS("testdata/results")))
	return dir
}

func nameOf(a protect.Attachment) string { return a.Network + "-" + a.Container + "-eth0" }

// TestRealFiles: files that libcni itself wrote are understood.
func TestRealFiles(t *testing.T) {
	r, err := New(results(t)).Read()
	must(t, err)
	want := map[protect.Attachment]Pod{
		web:     {"default", "web-0", []string{"8080/tcp"}, true},
		gateway: {"default", "gateway-x7k2p", []string{"443/tcp", "8443/tcp", "443/udp"}, true},
	}
	if d := cmp.Diff(want, r.Attached); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if r.Folder == "" || !r.Keeps(web) || r.Keeps(protect.Attachment{Network: "cbr0", Container: "5f1e"}) {
		t.Errorf("folder %q, keeps the first: %t", r.Folder, r.Keeps(web))
	}
}

// TestTornAndForeignFiles: an incomplete file counts as existing but names no pod; a file that
// is not libcni's is ignored.
func TestTornAndForeignFiles(t *testing.T) {
	dir := results(t)
	path := filepath.Join(dir, nameOf(web))
	whole, err := os.ReadFile(path)
	must(t, err)
	folder := New(dir)
	for _, size := range []int{0, 1, len(whole) / 2, len(whole) - 1} {
		must(t, os.WriteFile(path, whole[:size], 0o600))
		r, err := folder.Read()
		must(t, err)
		if _, known := r.Attached[web]; known || !r.Keeps(web) {
			t.Errorf("a file of %d of %d bytes: understood %t, there %t", size, len(whole), known, r.Keeps(web))
		}
	}
	must(t, os.WriteFile(path, whole, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "of-another-program"), whole, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "cbr0-a-eth0"), []byte(`{"cniVersion":"0.3.1","ips":[]}`), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "large"), make([]byte, maxBytes+1), 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "cbr0-b-eth0"), 0o700))
	must(t, os.Symlink(path, filepath.Join(dir, "cbr0-c-eth0")))
	r, err := folder.Read()
	must(t, err)
	if len(r.Attached) != 2 {
		t.Errorf("attached are %v", r.Attached)
	}
}

// TestChangesAreSeen: files appear and disappear, and another folder takes the folder's place.
func TestChangesAreSeen(t *testing.T) {
	dir := results(t)
	folder := New(dir)
	first, err := folder.Read()
	must(t, err)
	long := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(dir, long, long))
	for range 3 {
		again, err := folder.Read()
		must(t, err)
		if d := cmp.Diff(first.Attached, again.Attached); d != "" {
			t.Errorf("nothing changed (-want +got):\n%s", d)
		}
	}
	if !folder.calm {
		t.Error("a folder that has long been quiet is read each time")
	}
	must(t, os.Remove(filepath.Join(dir, nameOf(web))))
	r, err := folder.Read()
	must(t, err)
	if r.Keeps(web) || !r.Keeps(gateway) {
		t.Errorf("keeps the removed one: %t, the other one: %t", r.Keeps(web), r.Keeps(gateway))
	}
	must(t, os.RemoveAll(dir))
	if _, err := folder.Read(); err == nil {
		t.Error("a missing folder is read")
	}
	other := results(t)
	must(t, os.Rename(other, dir))
	r, err = folder.Read()
	must(t, err)
	if r.Folder == first.Folder || !r.Keeps(web) {
		t.Errorf("another folder is %q, was %q", r.Folder, first.Folder)
	}
	must(t, os.Chtimes(dir, long, long))
	must(t, os.WriteFile(filepath.Join(dir, "cbr0-late-eth0"), []byte(`{`), 0o600))
	must(t, os.Chtimes(dir, long, long)) // as if the clock of files had not moved
	_, err = folder.Read()
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "cbr0-late-eth0"),
		[]byte(`{"kind":"cniCacheV1","containerId":"late","ifName":"eth0","networkName":"cbr0"}`), 0o600))
	r, err = folder.Read()
	must(t, err)
	if _, ok := r.Attached[protect.Attachment{Network: "cbr0", Container: "late"}]; !ok {
		t.Error("a file that was half there is not read again: the folder's own time does not move")
	}
}

// TestFilesThatEndWithTheirPod: for an old cniVersion libcni may keep the file forever.
func TestFilesThatEndWithTheirPod(t *testing.T) {
	for config, want := range map[string]bool{
		`{"cniVersion":"0.4.0"}`: true, `{"cniVersion":"1.0.0"}`: true, `{"cniVersion":"1.1.0","name":"x"}`: true, `{"cniVersion":"0.10.0"}`: true,
		`{"cniVersion":"0.3.1"}`: false, `{"cniVersion":"0.2.0"}`: false, `{"cniVersion":""}`: false, `{"name":"x"}`: false, `{"cniVersion":1}`: false, `torn`: false, ``: false,
	} {
		if got := endsWithPod([]byte(config)); got != want {
			t.Errorf("%s: %t, want %t", config, got, want)
		}
	}
}
