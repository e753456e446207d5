package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// A bill is an SPDX document in the making: the released file, and its parts.
type bill struct {
	*spdx.Document
}

const (
	unknown = "NOASSERTION"
	sources = "https://github.com/canaryd/canaryd"
	program = "pkg:golang/github.com/canaryd/canaryd"
)

var notID = regexp.MustCompile(`[^A-Za-z0-9.]+`)

// newBill begins a document about one file of the release. Its address contains the version and
// the file's name, so that no two releases have the same.
func (r release) newBill(file string) bill {
	return bill{&spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName:      file,
		DocumentNamespace: sources + "/spdx/" + url.PathEscape(r.version) + "/" + r.commit + "/" + url.PathEscape(file),
		CreationInfo: &spdx.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "canaryd-hack-release"}},
			Created:  r.when.UTC().Format("2006-01-02T15:04:05Z"),
		},
	}}
}

// add adds a package and returns it, for references to it.
func (b bill) add(name, version, purl, license string) *spdx.Package {
	p := &spdx.Package{
		PackageName: name, PackageVersion: version,
		PackageSPDXIdentifier:   common.ElementID("Package-" + notID.ReplaceAllString(strings.TrimPrefix(purl, "pkg:"), "-")),
		PackageDownloadLocation: unknown,
		PackageLicenseConcluded: license, PackageLicenseDeclared: license, PackageCopyrightText: unknown,
		PackageExternalReferences: []*spdx.PackageExternalReference{{Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: purl}},
	}
	b.Packages = append(b.Packages, p)
	return p
}

func (b bill) relate(from common.ElementID, how string, to *spdx.Package) {
	b.Relationships = append(b.Relationships, &spdx.Relationship{
		RefA:         common.MakeDocElementID("", string(from)),
		RefB:         common.MakeDocElementID("", string(to.PackageSPDXIdentifier)),
		Relationship: how,
	})
}

// addProgram adds the built program and the modules that Go linked into it.
func (b bill) addProgram(name, path, version string) (*spdx.Package, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, err
	}
	digest, err := sum(path)
	if err != nil {
		return nil, err
	}
	purl := program + "@v" + url.PathEscape(version)
	if name != "canaryd" { // another program of the same module
		purl += "#cmd/" + name
	}
	main := b.add(name, version, purl, "Apache-2.0")
	main.PrimaryPackagePurpose = "APPLICATION"
	main.PackageHomePage = sources
	main.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: digest}}
	golang := strings.TrimPrefix(info.GoVersion, "go")
	b.relate(main.PackageSPDXIdentifier, common.TypeRelationshipDependsOn, b.add("stdlib", golang, "pkg:golang/stdlib@"+golang, "BSD-3-Clause"))
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		p := b.add(m.Path, m.Version, "pkg:golang/"+m.Path+"@"+url.PathEscape(m.Version), unknown)
		p.PackageSourceInfo = "go.sum: " + m.Sum
		b.relate(main.PackageSPDXIdentifier, common.TypeRelationshipDependsOn, p)
	}
	return main, nil
}

// addDebian adds a package of Debian, as dpkg describes it.
func (b bill) addDebian(status string) (*spdx.Package, error) {
	field := map[string]string{}
	for line := range strings.Lines(status) {
		if name, value, found := strings.Cut(strings.TrimSuffix(line, "\n"), ": "); found && !strings.HasPrefix(line, " ") {
			field[name] = value
		}
	}
	name, version, arch := field["Package"], field["Version"], field["Architecture"]
	if name == "" || version == "" || arch == "" {
		return nil, fmt.Errorf("no description of a package: %q", status)
	}
	p := b.add(name, version, "pkg:deb/debian/"+name+"@"+url.QueryEscape(version)+"?arch="+arch, unknown)
	p.PackageSourceInfo = "its terms are in the image: /usr/share/doc/" + name + "/copyright"
	if source := field["Source"]; source != "" {
		p.PackageSourceInfo += "; Debian's source package: " + source
	}
	return p, nil
}

// writeProgramBill writes the modules in a program; canaryd's modules are also in the packages.
func (r release) writeProgramBill(path, name, file string) error {
	b := r.newBill(filepath.Base(file))
	main, err := b.addProgram(name, file, r.version)
	if err != nil {
		return err
	}
	b.relate("DOCUMENT", common.TypeRelationshipDescribe, main)
	return b.write(path)
}

// writeImageBill writes the content of one architecture's image.
func (r release) writeImageBill(path, arch, digest string) error {
	b := r.newBill(strings.TrimSuffix(filepath.Base(path), ".spdx.json"))
	image := b.add("canaryd-image", r.version, "pkg:oci/canaryd@"+url.QueryEscape(digest)+"?arch="+arch, unknown)
	image.PrimaryPackagePurpose = "CONTAINER"
	image.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: strings.TrimPrefix(digest, "sha256:")}}
	b.relate("DOCUMENT", common.TypeRelationshipDescribe, image)
	main, err := b.addProgram("canaryd", r.program(arch), r.version)
	if err != nil {
		return err
	}
	b.relate(image.PackageSPDXIdentifier, common.TypeRelationshipContains, main)
	files, err := filepath.Glob(filepath.Join(r.rootfs(arch), "var/lib/dpkg/status.d/*"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("the image names no package of Debian's: %w", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		p, err := b.addDebian(string(text))
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		b.relate(image.PackageSPDXIdentifier, common.TypeRelationshipContains, p)
	}
	return b.write(path)
}

func (b bill) write(path string) error {
	return toFile(path, func(out io.Writer) error {
		return spdxjson.Write(b.Document, out, spdxjson.Indent("  "))
	})
}

// sum returns a file's SHA-256, in hexadecimal digits.
func sum(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}
