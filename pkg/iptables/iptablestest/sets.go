package iptablestest

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// Sets has the ipsets and nfacct objects of a Fake, in memory: see Fake.Sets.
type Sets struct {
	mu       sync.Mutex
	sets     map[string]iptables.Set
	accounts map[string]bool
	refused  map[string]error
	created  []string
}

// Sets returns the ipsets and nfacct objects of the Fake's namespace. Rules that name a missing
// object are refused, as by the kernel.
func (f *Fake) Sets() *Sets { return f.sets }

func newSets() *Sets {
	return &Sets{sets: map[string]iptables.Set{}, accounts: map[string]bool{}, refused: map[string]error{}}
}

// Put makes or replaces a set, as other programs do.
func (s *Sets) Put(set iptables.Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sets[set.Name] = set
}

// Destroy removes a set or an nfacct object. Unlike the kernel it does not check whether rules
// name it.
func (s *Sets) Destroy(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sets, name)
	delete(s.accounts, name)
}

// Refuse makes Create and Account of that name fail with err; nil ends the fault.
func (s *Sets) Refuse(name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused[name] = err
}

// Created returns the names that Create and Account made, in order.
func (s *Sets) Created() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.created)
}

// Names returns the names of all sets.
func (s *Sets) Names(ctx context.Context) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.sets)), ctx.Err()
}

// Save returns the named sets that exist.
func (s *Sets) Save(ctx context.Context, names []string) (map[string]iptables.Set, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := map[string]iptables.Set{}
	for _, name := range names {
		if set, ok := s.sets[name]; ok {
			found[name] = set
		}
	}
	return found, ctx.Err()
}

// Create makes a set, or returns ErrSetStands.
func (s *Sets) Create(_ context.Context, set iptables.Set) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused[set.Name]; err != nil {
		return err
	}
	if _, stands := s.sets[set.Name]; stands {
		return iptables.ErrSetStands
	}
	s.sets[set.Name] = set
	s.created = append(s.created, set.Name)
	return nil
}

// Account makes an nfacct object unless it exists.
func (s *Sets) Account(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused[name]; err != nil {
		return err
	}
	if !s.accounts[name] {
		s.accounts[name] = true
		s.created = append(s.created, name)
	}
	return nil
}

// lacks returns the first missing set and the first missing nfacct object.
func (s *Sets) lacks(sets, accounts []string) (set, account string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range sets {
		if _, ok := s.sets[name]; !ok && set == "" {
			set = name
		}
	}
	for _, name := range accounts {
		if !s.accounts[name] && account == "" {
			account = name
		}
	}
	return set, account
}
