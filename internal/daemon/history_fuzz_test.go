package daemon

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/internal/testkit/sample"
)

// FuzzJournal: the journal may contain any bytes. A start takes up only flush records, and
// status, page and command line can print each of them.
func FuzzJournal(f *testing.F) {
	good, err := json.Marshal(sample.Status().Flushes[0])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	for _, seed := range []string{
		`{}`, `null`, `7`, `{"id":"f1","time":"9999-12-31T23:59:59.999999999+23:59","kind":"emptied"}`,
		`{"id":"f1","time":"0000-01-01T00:00:00Z","kind":"<script>","absentSeconds":1e308,"noticedSeconds":-1e308,"attempts":-1}`,
		`{"id":"f1","time":"2026-01-01T00:00:00Z","kind":"emptied","families":["ipv5"]}`,
		`{"id":"f1","time":"2026-01-01T00:00:00Z","kind":"emptied","lost":{"chains":-1,"tables":[{"perChain":[{}],"more":-1},{}]}}`,
		`{"id":"f1","time":"2026-01-01T00:00:00Z","kind":"emptied","outcome":"\u001b[2J","culprit":{"pid":4294967295,"comm":"<b>"}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, record []byte) {
		dir := t.TempDir()
		line := append(append([]byte(`{"id":"f1","record":`), record...), "}\n"...)
		must(t, os.WriteFile(filepath.Join(dir, "journal.jsonl"), line, 0o600))
		d, st := &Daemon{cfg: Config{Journal: journal.New(dir)}}, &state{}
		d.recallFlushes(t.Context(), st)
		for _, flush := range st.journal {
			if !flush.Earlier || flush.ID == "" || flush.Outcome == api.Pending {
				t.Errorf("taken up as %+v", flush)
			}
		}
		s := api.Status{Flushes: st.journal}
		for _, shown := range []api.Status{s, s.Public()} {
			if _, err := json.Marshal(shown); err != nil {
				t.Error(err)
			}
		}
		if _, err := json.Marshal(api.FlushReply{Flush: append(st.journal, api.Flush{})[0]}); err != nil {
			t.Error(err)
		}
		if page := pageOf(t, s); !strings.Contains(page, "</html>") {
			t.Errorf("the page: %s", page)
		}
	})
}
