package api_test

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// A record in JSON is the same value again, and has a line for people.
func ExampleFlush() {
	var record api.Flush
	text := `{"id":"6a5f","time":"2026-01-01T00:00:00Z","kind":"emptied","families":["ipv4"],"tables":["nat"],
		"culprit":{"pid":4711,"comm":"iptables"},"lost":{"rules":12,"chains":3,"jumps":1},
		"absentSeconds":0.08,"outcome":"proved"}`
	if err := json.Unmarshal([]byte(text), &record); err != nil {
		panic(err)
	}
	fmt.Println(record.ByText(), record.Lost.Text(func(n int) string { return fmt.Sprint(n) }))
	fmt.Println(record.AbsentText(time.Now()), record.OutcomeText())
	// Output:
	// iptables (pid 4711) 12 rules, 3 chains, 1 jump
	// 0.080s proved
}
