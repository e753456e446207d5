package severity_test

import (
	"fmt"

	"github.com/go-logr/logr/funcr"

	"github.com/canaryd/canaryd/internal/severity"
)

// A sink that knows no levels writes the lines of all levels as information.
func ExampleWarnings() {
	log := funcr.New(func(_, line string) { fmt.Println(line) }, funcr.Options{})
	severity.Warnings(log).Info("Rules were lost", "flush", "6a5f")
	fmt.Println(severity.Warning)
	// Output:
	// "level"=0 "msg"="Rules were lost" "flush"="6a5f"
	// warning
}
