// Package cniresults reads the files in which libcni records attachments: one file for each
// container, network and interface, by default in /var/lib/cni/results. A container runtime
// (containerd, CRI-O) writes a file after the plugins' ADD and removes it after their DEL. It
// writes in place, so a read may find half a file.
//
// [New] names the folder, and [Folder.Read] returns a [Reading] of it: the attachments and their
// pods. An error means that the content is unknown, not that the folder is empty. A Folder is for
// one goroutine; a Reading is a value.
package cniresults

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/protect"
)

const (
	maxFiles = 4096    // a node has some hundred containers
	maxBytes = 1 << 20 // of one file, which usually has 2 KiB
	maxPorts = 64      // that are reported of one container
	// clockStep is how old a folder's time must be to prove that nothing has changed since
	// then. The kernel's clock for files advances in steps of some milliseconds.
	clockStep = 2 * time.Second
)

// A Pod is the pod that a file names. The names are empty for a container that Kubernetes did
// not create.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	// HostPorts are the ports requested from portmap, such as "8080/tcp".
	HostPorts []string `json:"hostPorts,omitempty"`
	// Ends means that libcni removes the file with the pod. For a network with a cniVersion
	// below 0.4.0, some of its releases keep the file forever.
	Ends bool `json:"ends,omitempty"`
}

// A Reading is the content of the folder at one moment.
type Reading struct {
	// Folder identifies the folder: another one may be mounted in its place.
	Folder string
	// Attached are the attachments of the files that could be read.
	Attached map[protect.Attachment]Pod

	names []string // of all files, even unreadable ones
}

// Keeps reports whether a file exists for the attachment, even an unreadable one.
func (r Reading) Keeps(a protect.Attachment) bool {
	_, ok := r.Attached[a]
	return ok || slices.ContainsFunc(r.names, func(name string) bool { return strings.HasPrefix(name, a.Network+"-"+a.Container+"-") })
}

// A Folder is the place of libcni's files. It is for one goroutine.
type Folder struct {
	path  string
	moved time.Time // the folder's modification time at the last read
	calm  bool      // if moved is the same, nothing has changed since
	last  Reading
	files map[string]file
}

// A file is the result of reading one file.
type file struct {
	size       int64
	moved      time.Time
	attachment protect.Attachment
	pod        Pod
	understood bool
}

// New returns a Folder that has not been read yet.
func New(path string) *Folder { return &Folder{path: path} }

// Read returns the present content of the folder for pods.Watch. If nothing has changed, that
// takes one system call. The error says why the content is unknown; a missing folder is an
// error, too.
func (d *Folder) Read() (Reading, error) {
	info, err := os.Stat(d.path)
	if err != nil {
		return Reading{}, fmt.Errorf("reading libcni's files: %w", err)
	}
	if d.calm && info.ModTime().Equal(d.moved) {
		return d.last, nil
	}
	d.calm = false
	folder, err := identity(d.path)
	if err != nil {
		return Reading{}, fmt.Errorf("reading libcni's files: %w", err)
	}
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return Reading{}, fmt.Errorf("reading libcni's files: %w", err)
	}
	if len(entries) > maxFiles {
		return Reading{}, fmt.Errorf("reading libcni's files: %s holds %d files, more than %d", d.path, len(entries), maxFiles)
	}
	r := Reading{Folder: folder, Attached: map[protect.Attachment]Pod{}}
	files := make(map[string]file, len(entries))
	allRead := true
	for _, e := range entries {
		r.names = append(r.names, e.Name())
		f := d.file(e)
		files[e.Name()] = f
		if f.understood {
			r.Attached[f.attachment] = f.pod
		}
		allRead = allRead && f.understood
	}
	d.moved, d.last, d.files = info.ModTime(), r, files
	d.calm = allRead && time.Since(d.moved) > clockStep
	return r, nil
}

// identity returns a text that differs for another folder in the same place. An inode's number
// may be used again at once, so the text also has the time of birth, if the file system has it.
func identity(path string) (string, error) {
	var s unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_BTIME, &s); err != nil {
		return "", &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return fmt.Sprintf("%d:%d:%d:%d.%09d", s.Dev_major, s.Dev_minor, s.Ino, s.Btime.Sec, s.Btime.Nsec), nil
}

// file reads one file for Read, unless it is unchanged. A file that cannot be read is not
// understood, and the next Read tries it again.
func (d *Folder) file(e os.DirEntry) file {
	info, err := e.Info()
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxBytes {
		return file{}
	}
	f := file{size: info.Size(), moved: info.ModTime()}
	if old, ok := d.files[e.Name()]; ok && old.understood && old.size == f.size && old.moved.Equal(f.moved) {
		return old
	}
	text, err := readFile(filepath.Join(d.path, e.Name()))
	if err == nil {
		f.attachment, f.pod, err = parse(e.Name(), text)
	}
	f.understood = err == nil
	return f
}

// readFile reads a file. It follows no link and waits for no pipe, which may have replaced the
// file since Read checked it.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // read only
	return io.ReadAll(io.LimitReader(f, maxBytes+1))
}

// A cached is the used part of libcni's cachedInfo (containernetworking/cni libcni/api.go,
// since 0.8). encoding/json ignores the case of names, which differs between runtimes.
type cached struct {
	Kind           string      `json:"kind"`
	Config         []byte      `json:"config"`
	ContainerID    string      `json:"containerId"`
	IfName         string      `json:"ifName"`
	NetworkName    string      `json:"networkName"`
	CniArgs        [][2]string `json:"cniArgs"`
	CapabilityArgs struct {
		PortMappings []struct {
			HostPort int    `json:"hostPort"`
			Protocol string `json:"protocol"`
			HostIP   string `json:"hostIP"`
		} `json:"portMappings"`
	} `json:"capabilityArgs"`
}

// errForeign means that libcni would not write this content under that name.
var errForeign = errors.New("not a file of libcni")

// parse returns the attachment and the pod of a file of libcni's. A file with another format,
// or another name than its content gives, is an error: its pod stays unknown.
func parse(name string, text []byte) (protect.Attachment, Pod, error) {
	var c cached
	if err := json.Unmarshal(text, &c); err != nil {
		return protect.Attachment{}, Pod{}, err
	}
	if c.Kind != "cniCacheV1" || c.NetworkName == "" || c.ContainerID == "" || c.IfName == "" ||
		name != c.NetworkName+"-"+c.ContainerID+"-"+c.IfName {
		return protect.Attachment{}, Pod{}, errForeign
	}
	pod := Pod{Ends: endsWithPod(c.Config)}
	for _, arg := range c.CniArgs {
		switch arg[0] {
		case "K8S_POD_NAMESPACE":
			pod.Namespace = arg[1]
		case "K8S_POD_NAME":
			pod.Name = arg[1]
		}
	}
	for _, m := range c.CapabilityArgs.PortMappings {
		if m.HostPort <= 0 || len(pod.HostPorts) == maxPorts {
			continue
		}
		port := strconv.Itoa(m.HostPort) + "/" + strings.ToLower(m.Protocol)
		if m.HostIP != "" {
			port = m.HostIP + ":" + port
		}
		pod.HostPorts = append(pod.HostPorts, port)
	}
	return protect.Attachment{Network: c.NetworkName, Container: c.ContainerID}, pod, nil
}

// endsWithPod reports whether a network's configuration has cniVersion 0.4.0 or later. Pods of
// older ones (Pod.Ends false) do not count as alive because of their file.
func endsWithPod(config []byte) bool {
	var c struct {
		CNIVersion string `json:"cniVersion"`
	}
	if json.Unmarshal(config, &c) != nil {
		return false
	}
	var major, minor int
	if _, err := fmt.Sscanf(c.CNIVersion, "%d.%d.", &major, &minor); err != nil {
		return false
	}
	return major > 0 || minor >= 4
}
