// Package cniresults reads the files in which libcni remembers what it attached: one per
// container, network and interface, /var/lib/cni/results by default. A container runtime
// (containerd, CRI-O) writes a file behind the plugins' ADD and removes it behind their
// DEL. It writes in place, so that a file may be half there.
package cniresults

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/protect"
)

const (
	mostFiles = 4096    // a node has some hundred containers
	mostBytes = 1 << 20 // of one file; usual are 2 KiB
	mostPorts = 64      // of one container that are named
	// restless is how long a folder's time is no proof that nothing has changed since: the
	// kernel's clock for files goes in steps of some milliseconds.
	restless = 2 * time.Second
)

// A Pod is what a file says of its container. The names are empty where Kubernetes did
// not make it.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	// HostPorts are those that portmap was asked for, such as "8080/tcp".
	HostPorts []string `json:"hostPorts,omitempty"`
}

// A Reading is what the folder held at one moment.
type Reading struct {
	// Folder identifies the folder itself: another one may be mounted in its place.
	Folder string
	// Attached are the containers of files that were read and understood.
	Attached map[protect.Attachment]Pod

	names []string // of all files, also of those that say nothing
}

// Keeps reports whether there is a file for the attachment, even one that cannot be read.
func (r Reading) Keeps(a protect.Attachment) bool {
	if _, ok := r.Attached[a]; ok {
		return true
	}
	for _, name := range r.names {
		if strings.HasPrefix(name, a.Network+"-"+a.Container+"-") {
			return true
		}
	}
	return false
}

// A Folder is where libcni keeps its files. It is for one goroutine.
type Folder struct {
	path  string
	moved time.Time // of the folder, when it was read last
	calm  bool      // nothing can have changed unless moved has
	last  Reading
	files map[string]file
}

// A file is what was read of one.
type file struct {
	size       int64
	moved      time.Time
	attachment protect.Attachment
	pod        Pod
	understood bool
}

// New returns a Folder that has not been read yet.
func New(path string) *Folder { return &Folder{path: path} }

// Read returns what the folder holds now. Where nothing has changed that costs one system
// call. The error says why that is not known; a missing folder is one.
func (d *Folder) Read() (Reading, error) {
	info, err := os.Stat(d.path)
	if err != nil {
		return Reading{}, fmt.Errorf("reading what libcni keeps: %w", err)
	}
	if d.calm && info.ModTime().Equal(d.moved) {
		return d.last, nil
	}
	d.calm = false
	folder, err := identity(d.path)
	if err != nil {
		return Reading{}, fmt.Errorf("reading what libcni keeps: %w", err)
	}
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return Reading{}, fmt.Errorf("reading what libcni keeps: %w", err)
	}
	if len(entries) > mostFiles {
		return Reading{}, fmt.Errorf("reading what libcni keeps: %s holds %d files, more than %d", d.path, len(entries), mostFiles)
	}
	r := Reading{Folder: folder, Attached: map[protect.Attachment]Pod{}}
	files := make(map[string]file, len(entries))
	whole := true
	for _, e := range entries {
		r.names = append(r.names, e.Name())
		f := d.file(e)
		files[e.Name()] = f
		if f.understood {
			r.Attached[f.attachment] = f.pod
		}
		whole = whole && f.understood
	}
	d.moved, d.last, d.files = info.ModTime(), r, files
	d.calm = whole && time.Since(d.moved) > restless
	return r, nil
}

// identity distinguishes a folder from another in its place. An inode's number is used again at
// once, so its time of birth belongs to it, where the file system has one.
func identity(path string) (string, error) {
	var s unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_BTIME, &s); err != nil {
		return "", &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return fmt.Sprintf("%d:%d:%d:%d.%09d", s.Dev_major, s.Dev_minor, s.Ino, s.Btime.Sec, s.Btime.Nsec), nil
}

// file reads one file, unless it is as it was. What cannot be read says nothing.
func (d *Folder) file(e os.DirEntry) file {
	info, err := e.Info()
	if err != nil || !info.Mode().IsRegular() || info.Size() > mostBytes {
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

// readFile reads a file that is what it was a moment ago: no link, no pipe.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // read only
	return io.ReadAll(io.LimitReader(f, mostBytes+1))
}

// A cached is libcni's cachedInfo (containernetworking/cni libcni/api.go, since 0.8), as
// far as it is of use here. Names of ports differ in their case between runtimes.
type cached struct {
	Kind           string      `json:"kind"`
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

// errForeign: the file is not what libcni writes under that name.
var errForeign = errors.New("no file of libcni's")

func parse(name string, text []byte) (protect.Attachment, Pod, error) {
	var c cached
	if err := json.Unmarshal(text, &c); err != nil {
		return protect.Attachment{}, Pod{}, err
	}
	if c.Kind != "cniCacheV1" || c.NetworkName == "" || c.ContainerID == "" || c.IfName == "" ||
		name != c.NetworkName+"-"+c.ContainerID+"-"+c.IfName {
		return protect.Attachment{}, Pod{}, errForeign
	}
	var pod Pod
	for _, arg := range c.CniArgs {
		switch arg[0] {
		case "K8S_POD_NAMESPACE":
			pod.Namespace = arg[1]
		case "K8S_POD_NAME":
			pod.Name = arg[1]
		}
	}
	for _, m := range c.CapabilityArgs.PortMappings {
		if m.HostPort <= 0 || len(pod.HostPorts) == mostPorts {
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
