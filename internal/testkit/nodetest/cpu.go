package nodetest

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// CPU returns the processor time of the daemon, and of its child programs that have ended, in
// steps of 10 ms. It is the sum of fields 14 to 17 of /proc/PID/stat (proc(5)), where USER_HZ
// is 100.
func (p *Process) CPU() time.Duration {
	p.n.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	p.n.Must(err)
	// The name in field 2 may contain blanks and brackets.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks int64
	for _, field := range fields[11:15] {
		n, err := strconv.ParseInt(field, 10, 64)
		p.n.Must(err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
