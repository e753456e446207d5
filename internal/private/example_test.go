package private_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/canaryd/canaryd/internal/private"
)

// A file is replaced as a whole, and read only if no other user could have written it.
func Example() {
	parent, err := os.MkdirTemp("", "private")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(parent)
	folder := filepath.Join(parent, "state")
	if err := private.Folder(folder); err != nil {
		panic(err)
	}
	path := filepath.Join(folder, "marks.json")
	if err := private.Write(path, private.Summed([]byte(`{"nonce":"6a5f"}`))); err != nil {
		panic(err)
	}
	text, err := private.Read(path, 1<<10)
	fmt.Println(private.SumHolds(text), err)

	text[2] = 'N' // a bit has changed on the disk
	fmt.Println(private.SumHolds(text))
	// Output:
	// true <nil>
	// false
}
