package reload

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Owners has canaryd's knowledge of the rules' owners, apart from the rules themselves. A restart
// must not lose it: rules whose owner is gone would pass for maintained ones.
type Owners struct {
	// Proxy has the families in which kube-proxy's canary was seen. The value is the machine's
	// uptime when the canary was first missing; 0 means that it was there.
	Proxy map[rules.Family]time.Duration `json:"proxy,omitempty"`
	// Folder identifies libcni's folder, and Pods are its containers for which the generation has
	// rules.
	Folder string        `json:"folder,omitempty"`
	Pods   []AttachedPod `json:"pods,omitempty"`
}

// AttachedPod is a container that has a file of libcni.
type AttachedPod struct {
	protect.Attachment
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name,omitempty"`
	HostPorts []string `json:"hostPorts,omitempty"`
	Gone      bool     `json:"gone,omitempty"`     // the file does not exist any more
	Returned  bool     `json:"returned,omitempty"` // a replay put its rules back
}

// storedOwners is the file of Owners.
type storedOwners struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
	Owners   Owners   `json:"owners"`
}

func (s *Store) ownersPath() string { return filepath.Join(s.dir, "owners.json") }

// SaveOwners writes canaryd's knowledge of owners, so that it survives a restart.
func (s *Store) SaveOwners(o Owners) error {
	if err := s.write(s.ownersPath(), storedOwners{everywhere, s.identity, o}); err != nil {
		return fmt.Errorf("saving the list of owners: %w", err)
	}
	return nil
}

// LoadOwners returns the last saved Owners, for a start. It returns nothing if they were never
// saved, or are of another boot, network namespace, backend or iptables version. The error
// names the broken part.
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
