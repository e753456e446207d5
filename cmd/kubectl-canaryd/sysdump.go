package main

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
)

// A dump is an archive in the making, one file after the other.
type dump struct {
	tar   *tar.Writer
	gzip  *gzip.Writer
	when  time.Time
	whole bool // nothing is redacted
	count int  // folders of nodes whose names are odd
}

func newDump(w io.Writer, when time.Time, whole bool) *dump {
	zip := gzip.NewWriter(w)
	return &dump{tar: tar.NewWriter(zip), gzip: zip, when: when, whole: whole}
}

// add adds a file to the archive. Unless the user wants it unredacted (whole), it replaces
// addresses.
func (d *dump) add(path string, text []byte) error {
	if !d.whole { // kubectl's errors have addresses, and so may the words of an error in a status
		text = withoutAddresses(text)
	}
	header := &tar.Header{Name: path, Mode: 0o600, Size: int64(len(text)), ModTime: d.when, Typeflag: tar.TypeReg, Format: tar.FormatPAX}
	if err := d.tar.WriteHeader(header); err != nil {
		return err
	}
	_, err := d.tar.Write(text)
	return err
}

func (d *dump) close() error { return errors.Join(d.tar.Close(), d.gzip.Close()) }

// folder returns the folder of a node in the archive. An invalid name does not lead to another
// folder: the node gets a number instead.
func (d *dump) folder(name string) string {
	if !isName(name) {
		d.count++
		name = "odd-name-" + strconv.Itoa(d.count)
	}
	return "canaryd-sysdump/nodes/" + name + "/"
}

// nodeFiles are the files of one node, and the reasons why some are missing.
type nodeFiles struct {
	status statusRow
	files  []file
	silent []string
}

type file struct {
	name string
	text []byte
}

// add adds a file of a node, or notes for the archive's README why it is missing. It adds
// nothing after an error.
func (n *nodeFiles) add(name string, text []byte, err error) {
	if err != nil {
		n.silent = append(n.silent, name+": "+cell(err.Error()))
		return
	}
	n.files = append(n.files, file{name, text})
}

func (n *nodeFiles) addJSON(name string, value any) {
	text, err := json.MarshalIndent(value, "", "  ")
	n.add(name, append(terminal.PlainJSON(text), '\n'), err)
}

// A sysdumpReply describes the archive.
type sysdumpReply struct {
	File       string `json:"file"`
	Nodes      int    `json:"nodes"`
	Bytes      int64  `json:"bytes"`
	Incomplete int    `json:"incomplete"` // nodes with missing files
	WithoutPod int    `json:"withoutPod,omitempty"`
}

// runSysdump writes the archive of all nodes into a new file. If a node or a file of it is
// missing, the code is exitError and the archive stays. If writing fails, the file is removed.
func runSysdump(ctx context.Context, o *options, to streams) (int, error) {
	f, err := o.open(ctx, to)
	if err != nil {
		return exitError, err
	}
	when := to.now().UTC().Truncate(time.Second)
	path := cmp.Or(o.file, "canaryd-sysdump-"+when.Format("20060102-150405")+".tar.gz")
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return exitError, err
	}
	reply, err := f.dump(ctx, to, out, when)
	if err = errors.Join(err, out.Close()); err != nil {
		_ = os.Remove(path) // the error explains enough
		return exitError, fmt.Errorf("writing %s: %w", path, err)
	}
	code := exitOK
	if reply.File = path; reply.Incomplete+reply.WithoutPod > 0 {
		code = exitError
	}
	return code, show(to.out, o.output, reply, func(w io.Writer) {
		fmt.Fprintf(w, "%s: %s, %d KiB", terminal.Plain(path), count(reply.Nodes, "node"), (reply.Bytes+1023)/1024)
		if reply.Incomplete > 0 {
			fmt.Fprintf(w, "; of %d something is missing, and README.txt in it says why", reply.Incomplete)
		}
		fmt.Fprintln(w, withoutText(reply.WithoutPod))
	})
}

// dump writes the archive to out for runSysdump: first each node's files, as nodes answer, then
// the summary. An error means that the archive is unusable. A silent node is no error; the
// reply counts it.
func (f *fleet) dump(ctx context.Context, to streams, out *os.File, when time.Time) (sysdumpReply, error) {
	d := newDump(out, when, f.unredacted)
	reply := sysdumpReply{Nodes: len(f.nodes), WithoutPod: f.without}
	states := statusReply{Nodes: []statusRow{}, States: map[api.HealthState]int{}, WithoutPod: f.without}
	var silent []string
	var failed error
	asking, stop := context.WithCancel(ctx)
	defer stop()
	askAll(asking, f, to, func(ctx context.Context, n node) (nodeFiles, error) {
		files := f.filesOf(ctx, n, to.now())
		if len(files.silent) > 0 {
			return files, errors.New(files.silent[0])
		}
		return files, nil
	}, func(n node, files nodeFiles, _ error) {
		folder := d.folder(n.name)
		for _, file := range files.files {
			if failed == nil {
				failed = d.add(folder+file.name, file.text)
			}
			if failed != nil { // there will be no archive
				stop()
			}
		}
		for _, why := range files.silent {
			silent = append(silent, cell(n.name)+" "+why)
		}
		if len(files.silent) > 0 {
			reply.Incomplete++
		}
		states.add(files.status)
	})
	if failed != nil {
		return reply, failed
	}
	states.sort()
	slices.Sort(silent)
	var table strings.Builder
	writeFleet(&table, states)
	text, err := json.MarshalIndent(states, "", "  ")
	err = errors.Join(err,
		d.add("canaryd-sysdump/nodes.txt", []byte(table.String())),
		d.add("canaryd-sysdump/nodes.json", append(terminal.PlainJSON(text), '\n')),
		d.add("canaryd-sysdump/kubernetes.json", f.kubernetes(ctx)),
		d.add("canaryd-sysdump/README.txt", []byte(f.readme(when, silent))),
		d.close())
	if info, statErr := out.Stat(); statErr == nil {
		reply.Bytes = info.Size()
	}
	return reply, err
}

// filesOf queries one node for all its files in the archive. A file that it cannot get is noted
// in silent. now dates the flushes in its row.
func (f *fleet) filesOf(ctx context.Context, n node, now time.Time) (files nodeFiles) {
	files.addJSON("pod.json", n.info)
	s, h, err := statusOf(f.exec(ctx, n, mostStatus, "status", "-o", "json"))
	files.status = rowOf(n, s, h, err, now)
	if err != nil {
		files.add("status.json", nil, err)
	} else {
		if !f.unredacted {
			s = s.Public()
		}
		flushes := s.Flushes
		s.Flushes = nil
		files.addJSON("status.json", s)
		files.addJSON("flushes.json", flushes)
	}
	files.version(f.exec(ctx, n, mostSmall, "version", "-o", "json"))
	files.log("log.txt", f, f.logs(ctx, n))
	if n.info.Restarts > 0 && n.why == "" {
		files.log("log-before-restart.txt", f, f.logs(ctx, n, "--previous"))
	}
	return files
}

// version adds the version of canaryd in a pod, from the answer to canaryd version -o json.
func (n *nodeFiles) version(a answer) {
	var v struct {
		Version string `json:"version"`
		Commit  string `json:"commit"`
		Go      string `json:"go"`
	}
	err := a.failed()
	if err == nil {
		err = read(a.out, &v)
	}
	if err != nil {
		n.add("version.json", nil, err)
		return
	}
	v.Version, v.Commit, v.Go = clip(v.Version), clip(v.Commit), clip(v.Go)
	n.addJSON("version.json", v)
}

// log adds the redacted log of a pod, or notes why it is missing.
func (n *nodeFiles) log(name string, f *fleet, a answer) {
	if err := a.failed(); err != nil {
		n.add(name, nil, err)
		return
	}
	n.add(name, redactLog(a.out, f.unredacted), nil)
}

// logs reads the end of a node's log. Its limit is below the limit of an answer, because
// exceeding that would be an error.
func (f *fleet) logs(ctx context.Context, n node, more ...string) answer {
	words := []string{"logs", "--namespace=" + f.namespace, "--container=" + f.container,
		"--tail=" + strconv.Itoa(f.logLines), "--limit-bytes=" + strconv.Itoa(mostLog)}
	return f.bounded(ctx, n, 2*mostLog, append(append(words, more...), n.pod)...)
}

// kubernetes returns the versions of kubectl and the API server as a file of the archive. Their
// absence is no failure: the file then has an error.
func (f *fleet) kubernetes(ctx context.Context) []byte {
	type version struct {
		GitVersion string `json:"gitVersion,omitempty"`
		Platform   string `json:"platform,omitempty"`
	}
	var v struct {
		Client version `json:"clientVersion"`
		Server version `json:"serverVersion"`
		Error  string  `json:"error,omitempty"`
	}
	a := f.kubectl.run(ctx, mostSmall, "version", "-o", "json")
	err := a.failed()
	if err == nil {
		err = read(a.out, &v)
	}
	if err != nil {
		v.Error = "kubectl version gave no answer"
	}
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil
	}
	return append(terminal.PlainJSON(text), '\n')
}

// readme returns the archive's README: its files, and the missing ones with the reasons in
// silent.
func (f *fleet) readme(when time.Time, silent []string) string {
	number, commit := version()
	var b strings.Builder
	fmt.Fprintf(&b, "Written by kubectl-canaryd %s, commit %s, at %s, of %s in the namespace %s.\n\n",
		number, commit, when.Format(time.RFC3339), count(len(f.nodes), "node"), f.namespace)
	if f.unredacted {
		b.WriteString("NOTHING is redacted: it has rules, comments, addresses and command lines.\n")
	} else {
		b.WriteString("It has no rule, comment, address or command line. It names nodes, chains, native tables, pods whose\n" +
			"host ports were lost, and programs that wrote rules. Of a log line it has the message and harmless\n" +
			"values; (redacted) is in the place of others.\n")
	}
	b.WriteString(`
nodes.txt, nodes.json    how each node is, the worst first
nodes/NODE/status.json   canaryd status -o json
nodes/NODE/flushes.json  the flush records that the node keeps
nodes/NODE/version.json  canaryd version
nodes/NODE/pod.json      its pod
nodes/NODE/log.txt       the end of its log, and log-before-restart.txt that of the container before
`)
	if len(silent) > 0 {
		b.WriteString("\nMissing:\n")
	}
	for _, line := range silent {
		b.WriteString("  " + line + "\n")
	}
	return b.String()
}
