package reload

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/rules"
)

// baselineFormat is the format of the baseline's file. It is separate, because that file survives a
// boot and changes less often than the others. Format 1 has no chains that protected rules lead to,
// and format 2 no native tables: none was confirmed.
const baselineFormat = 3

// A Baseline is the content that an operator confirmed. It is bound to no boot, backend or
// iptables version, because it is compared and never written to the kernel.
type Baseline struct {
	Format     int              `json:"format"`
	Confirmed  time.Time        `json:"confirmed"`
	ID         string           `json:"id"`
	Captured   time.Time        `json:"captured"` // when the generation was learned
	Rules      int              `json:"rules"`    // of the generation, jumps included
	Chains     int              `json:"chains"`
	Generation rules.Generation `json:"generation"`
	// Native has digests by table, such as "ip kube-proxy", and by part: see native.Entry.Key.
	Native map[string]map[string][]byte `json:"native,omitempty"`
	// Sum is the file's checksum; "" in a value.
	Sum string `json:"sum,omitempty"`
}

// BaselineDigest is the size of one digest of a native table's part: no process can find two rules
// with one digest.
const BaselineDigest = 16

func (s *Store) baselinePath() string { return filepath.Join(s.dir, "baseline.json") }

// SaveBaseline replaces the baseline, and returns it as it was written. It and the other methods
// for baselines may be called by any goroutine.
func (s *Store) SaveBaseline(b Baseline) (Baseline, error) {
	b.Format, b.ID = baselineFormat, b.Generation.ID()
	b.Rules, b.Chains = b.Generation.Counts()
	text, err := json.Marshal(b)
	text = private.Summed(text)
	if err == nil && len(text) > maxStored {
		err = fmt.Errorf("it would have %d MiB, and canaryd reads %d at most", len(text)>>20, maxStored>>20)
	}
	if err == nil {
		err = private.Write(s.baselinePath(), text)
	}
	if err != nil {
		return Baseline{}, fmt.Errorf("saving the baseline: %w", err)
	}
	return b, nil
}

// LoadBaseline returns the baseline. The error is ErrNothingStored, or names the broken part of the
// file; then no part of the file is used.
func (s *Store) LoadBaseline() (Baseline, error) {
	b, err := readBaseline(s.baselinePath())
	if err != nil && !errors.Is(err, ErrNothingStored) {
		err = fmt.Errorf("reading the baseline: %w", err)
	}
	return b, err
}

// readBaseline reads a baseline's file and checks its content, for LoadBaseline. A missing file
// is ErrNothingStored.
func readBaseline(path string) (Baseline, error) {
	var b Baseline
	if err := readFile(path, baselineFormat, &b); err != nil {
		return Baseline{}, err
	}
	if b.Format < 1 || b.Confirmed.IsZero() || b.Generation == nil {
		return Baseline{}, fmt.Errorf("%s is corrupt: it is no baseline", path)
	}
	if got := b.Generation.ID(); got != b.ID {
		return Baseline{}, fmt.Errorf("%s is corrupt: it names generation %s, and its content is %s", path, b.ID, got)
	}
	for table, parts := range b.Native {
		for _, digests := range parts {
			if len(digests)%BaselineDigest != 0 {
				return Baseline{}, fmt.Errorf("%s is corrupt: a digest of table %s has another size", path, table)
			}
		}
	}
	b.Sum = ""
	b.Rules, b.Chains = b.Generation.Counts()
	return b, nil
}

// ForgetBaseline removes the baseline, whatever its file holds.
func (s *Store) ForgetBaseline() error {
	return removeFile(s.baselinePath(), "the baseline")
}
