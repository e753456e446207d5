package iptables

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestQuestionsGetNoSignals: during a question to the kernel the thread blocks
// all signals but the two that cannot be blocked. Before and after it, the thread
// blocks none.
func TestQuestionsGetNoSignals(t *testing.T) {
	blocked := func() string {
		text, err := os.ReadFile("/proc/thread-self/status")
		if err != nil {
			t.Fatal(err)
		}
		return regexp.MustCompile(`(?m)^SigBlk:\t([0-9a-f]+)$`).FindStringSubmatch(string(text))[1]
	}
	const none, all = "0000000000000000", "fffffffffffbfeff"
	var got []string
	s := xtSocket{family: rules.IPv4, ask: func(int, uintptr, uintptr, []byte) (int, error) {
		got = append(got, blocked())
		return 0, nil
	}}
	got = append(got, blocked())
	if _, err := s.getsockopt(soGetInfo, nil); err != nil {
		t.Error(err)
	}
	got = append(got, blocked())
	if diff := cmp.Diff([]string{none, all, none}, got); diff != "" {
		t.Errorf("blocked before, while and after the kernel is asked (-want +got):\n%s", diff)
	}
}

// TestFaultIsAskedAgain: EFAULT means that bpfilter's process has ended. The
// kernel starts it again for the next question. Each other error is an answer.
func TestFaultIsAskedAgain(t *testing.T) {
	for _, c := range []struct {
		answers []error
		asked   int
		want    error
	}{
		{[]error{nil}, 1, nil},
		{[]error{unix.EFAULT, unix.EFAULT, nil}, 3, nil},
		{[]error{unix.EFAULT, unix.EPERM, nil}, 2, unix.EPERM},
		{[]error{unix.EAGAIN, nil}, 1, unix.EAGAIN},
		{[]error{unix.EFAULT, unix.EFAULT, unix.EFAULT, unix.EFAULT, unix.EFAULT, nil}, 5, unix.EFAULT},
	} {
		t.Run(fmt.Sprint(c.answers), func(t *testing.T) {
			asked := 0
			s := xtSocket{family: rules.IPv4, ask: func(int, uintptr, uintptr, []byte) (int, error) {
				asked++
				return 84, c.answers[asked-1]
			}}
			_, err := s.getsockopt(soGetInfo, nil)
			if !errors.Is(err, c.want) || asked != c.asked {
				t.Errorf("asked %d times: %v, want %d times: %v", asked, err, c.asked, c.want)
			}
		})
	}
}

// TestStrangeAnswers: a kernel accepts a malformed question. If it lists no
// table, it has no legacy iptables. If it lists a table, the table's content is
// unknown, and not empty.
func TestStrangeAnswers(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy")
		s, err := openXT(rules.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		defer s.close()
		s.ask = func(int, uintptr, uintptr, []byte) (int, error) { return 0, fmt.Errorf("%w: 256", errStrange) }
		if err := s.check(); !errors.Is(err, errNoLegacy) {
			t.Errorf("without a table: %v, want %v", err, errNoLegacy)
		}
		iptablesCommand(t, Legacy, rules.IPv4, "-L -n")
		if err := s.check(); err == nil || errors.Is(err, errNoLegacy) || !strings.Contains(err.Error(), errStrange.Error()) {
			t.Errorf("with a table: %v, want %v only", err, errStrange)
		}
		if _, err := s.info(rules.Filter); !errors.Is(err, errStrange) {
			t.Errorf("the shape of a table is answered with %v, want %v", err, errStrange)
		}
	})
}
