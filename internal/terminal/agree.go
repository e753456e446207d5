package terminal

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"
)

// Agreed writes a question to out, reads one line from in, and reports whether it is a yes.
// Without a terminal in is nil, and Agreed returns false without a question. It also returns
// false if ctx ends first; then the reader waits on until a line arrives or the program ends.
func Agreed(ctx context.Context, in io.Reader, out io.Writer, question string) bool {
	if in == nil {
		return false
	}
	_, _ = fmt.Fprint(out, question+" [y/N] ")
	answers := make(chan string, 1)
	go func() {
		answer, _ := bufio.NewReader(in).ReadString('\n')
		answers <- strings.ToLower(strings.TrimSpace(answer))
	}()
	select {
	case <-ctx.Done():
		_, _ = fmt.Fprintln(out)
		return false
	case answer := <-answers:
		return answer == "y" || answer == "yes"
	}
}
