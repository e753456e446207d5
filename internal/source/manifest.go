package source

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// A Manifest declares the rules that kube-proxy and kubelet would write for Kubernetes objects.
// The Services, EndpointSlices and the Node are in a file, or in the *.yaml, *.yml and *.json
// files of a folder.
type Manifest struct {
	Path    string
	Options kube.Options
}

// Name returns "manifest".
func (m Manifest) Name() string { return "manifest" }

func (m Manifest) files() files {
	return files{path: m.Path, wanted: inManifest, kinds: "*.yaml, *.yml or *.json"}
}

func (m Manifest) recall(g rules.Generation) Declared {
	return Declared{Generation: g, owners: m.owners()}
}

func inManifest(name string) bool {
	return !strings.HasPrefix(name, ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}

// declare makes kube-proxy's rules of all objects in the files. The error joins the errors of
// all files; then none of them counts. last saves decoding unchanged objects again.
func (m Manifest) declare(files []file, last Declared) (Declared, error) {
	decoder := last.decoded.Next()
	var objects kube.Objects
	var bad []error
	for _, f := range files {
		found, err := decode(decoder, f)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		objects.Add(found)
	}
	if len(bad) > 0 {
		return Declared{}, errors.Join(bad...)
	}
	generation, skips, err := kube.Generate(objects, m.Options)
	if err != nil {
		return Declared{}, err
	}
	return Declared{Generation: generation, Skips: skips, decoded: decoder, owners: m.owners()}, nil
}

// owners returns the owner of the declared rules: the manifest claims all of kube-proxy's
// chains.
func (m Manifest) owners() []owner {
	return []owner{{
		source: m.Name(),
		claims: owners.KubeRules,
		where:  func(rules.Family, rules.TableName, string) string { return "the manifest " + m.Path },
	}}
}

// decode returns the objects of one file. A file without an object is an error, because it
// would declare that there is no service.
func decode(decoder *kube.Decoder, f file) (kube.Objects, error) {
	if isBlank(f.data) {
		return kube.Objects{}, fmt.Errorf("%s: holds no object: delete the file, or write an empty List if no services are meant", f.name)
	}
	return decoder.Decode(f.name, f.data)
}

// isBlank reports whether YAML has only comments and document separators.
func isBlank(data []byte) bool {
	for line := range bytes.Lines(bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && !bytes.Equal(line, []byte("---")) && !bytes.Equal(line, []byte("...")) {
			return false
		}
	}
	return true
}
