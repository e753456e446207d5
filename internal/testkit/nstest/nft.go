package nstest

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"
)

// An NFT is one running nft for many transactions. A transaction takes a fiftieth of the
// processor time of an execution of nft.
type NFT struct {
	t     *testing.T
	in    io.Writer
	said  *bufio.Scanner
	tries int
}

// StartNFT starts an nft that ends with the test.
func StartNFT(t *testing.T) *NFT {
	t.Helper()
	NeedProgram(t, "nft")
	cmd := exec.Command("nft", "-i")
	cmd.Env = append(cmd.Environ(), "HOME="+t.TempDir()) // it keeps a history
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close() // which ends nft
		_ = cmd.Wait()
	})
	return &NFT{t: t, in: in, said: bufio.NewScanner(errs)}
}

// Try runs the lines of a transaction, and returns nft's words if that fails. No line may end
// in the middle of a list. The refusal of another transaction shows the end. Any goroutine may
// call Try, one at a time.
func (n *NFT) Try(text string) error {
	n.tries++
	end := fmt.Sprintf("delete table ip no%d", n.tries)
	line := strings.ReplaceAll(strings.TrimSpace(text), "\n", "; ")
	if _, err := fmt.Fprintf(n.in, "%s\n%s\n", line, end); err != nil {
		return fmt.Errorf("nft -i: %w", err)
	}
	var said strings.Builder
	errors := 0
	for n.said.Scan() && n.said.Text() != end {
		fmt.Fprintln(&said, n.said.Text())
		if strings.HasPrefix(n.said.Text(), "Error:") {
			errors++
		}
	}
	switch {
	case n.said.Text() != end:
		return fmt.Errorf("nft -i ended: %v, %s\n%s", n.said.Err(), &said, line)
	case errors > 1: // one error is that of end
		return fmt.Errorf("%s\n%s", line, &said)
	}
	return nil
}

// Run is Try for a transaction that must not fail.
func (n *NFT) Run(text string) {
	n.t.Helper()
	if err := n.Try(text); err != nil {
		n.t.Fatal(err)
	}
}
