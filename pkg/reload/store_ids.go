package reload

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// prefixPattern matches the beginning of an ID, which an operator may give instead of the ID.
var prefixPattern = regexp.MustCompile(`^[0-9a-f]{1,11}$`)

// ExpandID returns the ID that begins with a prefix that an operator has given. It returns
// prefix itself if no ID begins with it, or if it cannot begin an ID. The error names the IDs
// if several begin with it.
func ExpandID(prefix string, ids []string) (string, error) {
	if !prefixPattern.MatchString(prefix) {
		return prefix, nil
	}
	var found []string
	for _, id := range ids {
		if strings.HasPrefix(id, prefix) && !slices.Contains(found, id) {
			found = append(found, id)
		}
	}
	switch len(found) {
	case 0:
		return prefix, nil
	case 1:
		return found[0], nil
	}
	slices.Sort(found)
	return "", fmt.Errorf("%q begins the IDs of %d generations: %s", prefix, len(found), strings.Join(found, ", "))
}

// IDsIn returns the IDs in the file names of a folder of generations, for ExpandID. It does not
// check whether the files can be read.
func IDsIn(folder string) (ids []string) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), ".json"); ok && idPattern.MatchString(id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// StoredIDs returns the IDs of the generations in a state folder.
func StoredIDs(dir string) []string { return IDsIn(filepath.Join(dir, generationsFolder)) }
