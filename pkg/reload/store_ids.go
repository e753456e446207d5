package reload

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// prefixPattern is a part of an ID that an operator may give for it.
var prefixPattern = regexp.MustCompile(`^[0-9a-f]{1,11}$`)

// ExpandID returns the ID that begins with a prefix. What no ID begins with stays as it is, and so
// does what is no prefix. The error names the IDs if several begin with it.
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

// IDsIn returns the IDs that the names of the files in a folder of generations say. Whether a file
// can be read is another question.
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
