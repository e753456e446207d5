package reload

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Owners is what is known of the owners of rules, apart from the rules themselves, and that
// a restart must not forget: without it, rules that no process keeps would pass for
// rules that one does.
type Owners struct {
	// Proxy holds the families in which kube-proxy's canary was seen, with how long the
	// machine had been up when it was first missing; 0: it stood.
	Proxy map[rules.Family]time.Duration `json:"proxy,omitempty"`
	// Folder identifies that of libcni's files, and Pods are those of its containers for
	// which the generation has rules.
	Folder string        `json:"folder,omitempty"`
	Pods   []AttachedPod `json:"pods,omitempty"`
}

// AttachedPod is a container of which a file of libcni's was seen.
type AttachedPod struct {
	protect.Attachment
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name,omitempty"`
	HostPorts []string `json:"hostPorts,omitempty"`
	Gone      bool     `json:"gone,omitempty"`     // the file is not there any more
	Returned  bool     `json:"returned,omitempty"` // a replay put its rules back
}

// storedOwners are Owners on disk.
type storedOwners struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
	Owners   Owners   `json:"owners"`
}

func (s *Store) ownersPath() string { return filepath.Join(s.dir, "owners.json") }

// SaveOwners writes what is known of owners.
func (s *Store) SaveOwners(o Owners) error {
	if err := s.write(s.ownersPath(), storedOwners{format, s.identity, o}); err != nil {
		return fmt.Errorf("keeping what is known of owners: %w", err)
	}
	return nil
}

// LoadOwners returns what was known of owners last; nothing if it was never written, or
// of another boot, network namespace, backend or version of iptables: those rules are
// not these. The error says what is broken.
func (s *Store) LoadOwners() (Owners, error) {
	var stored storedOwners
	err := s.read(s.ownersPath(), &stored)
	switch {
	case errors.Is(err, ErrNothingStored):
		return Owners{}, nil
	case err != nil:
		return Owners{}, err
	case s.checkIdentity(stored.Identity) != nil:
		return Owners{}, nil
	}
	return stored.Owners, nil
}
