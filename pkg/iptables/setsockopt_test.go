package iptables

import (
	"errors"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// Kernels before 4.20 need another request, and give the same answers.
func TestNumbersOfIpsetsByOption(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "ipset")
		s := &setNumbers{}
		defer s.close()
		for _, name := range []string{"first", "a b", "0123456789012345678901234567890"} {
			nstest.Command(t, "ipset", "create", name, "hash:ip")
			number, err := s.number(name)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := setNumberByOption(name); err != nil || got != number {
				t.Errorf("the number of %q is %d, %v; want %d", name, got, err, number)
			}
			if got, err := setNameByOption(number); err != nil || got != name {
				t.Errorf("the name of %d is %q, %v; want %q", number, got, err, name)
			}
		}
		if _, err := setNumberByOption("gone"); !errors.Is(err, ErrNoSet) {
			t.Errorf("a set that does not exist: %v", err)
		}
		if _, err := setNameByOption(77); !errors.Is(err, ErrNoSet) {
			t.Errorf("a number of no set: %v", err)
		}
	})
}
