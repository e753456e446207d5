package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

const (
	// maxSets and maxSetText bound the stored ipsets: 16 MiB are some 400,000 addresses.
	// kube-proxy in ipvs mode has 15 sets.
	maxSets    = 512
	maxSetText = 16 << 20
	// setTimeout is for one ipset; ipset saves 65,536 members in 0.1 s.
	setTimeout = 10 * time.Second
	// maxSetName is IPSET_MAXNAMELEN without its NUL (linux/netfilter/ipset/ip_set.h).
	maxSetName = 31
	// draftPrefix begins the temporary name of a set that is being filled.
	draftPrefix = "canaryd-draft-"
)

// Errors of Sets that callers decide by.
var (
	// ErrNoSet: there is no ipset of that name.
	ErrNoSet = errors.New("there is no such ipset")
	// ErrSetStands: an ipset of that name exists already.
	ErrSetStands = errors.New("such an ipset is there already")
	errSetTooBig = fmt.Errorf("the ipsets that protected rules name are more than %d or larger than %d MiB", maxSets, maxSetText>>20)
)

// A Set is an ipset as "ipset save" prints it.
type Set struct {
	Name    string   `json:"name"`
	Create  string   `json:"create"`            // the text behind "create NAME"
	Members []string `json:"members,omitempty"` // the texts behind "add NAME", in order
}

// Validate returns the reason why the set is not safe as input of "ipset restore", or nil. No
// text may end its line or look like an option. canaryd saves, loads and creates only valid
// sets.
func (s Set) Validate() error {
	if !validSetName(s.Name) {
		return fmt.Errorf("%q cannot be the name of an ipset here", s.Name)
	}
	for _, text := range append([]string{s.Create}, s.Members...) {
		if text == "" || text[0] == '-' || strings.ContainsFunc(text, func(c rune) bool { return c < ' ' || c == 0x7f }) {
			return fmt.Errorf("ipset %s: %q cannot be restored", s.Name, text)
		}
	}
	return nil
}

// validSetName reports whether a name means the same to ipset and in its restore format. The
// kernel accepts any bytes, but canaryd does not restore such sets.
func validSetName(name string) bool {
	return plainSetName(name) && !strings.HasPrefix(name, draftPrefix)
}

// plainSetName reports whether a name means the same to every program that reads it.
func plainSetName(name string) bool {
	return name != "" && len(name) <= maxSetName && name[0] != '-' &&
		!strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c >= 0x7f || strings.ContainsRune(`"'\`, c) })
}

// Lists returns the names of the member sets, if the set is a set of sets. They must be saved,
// too, and created before it.
func (s Set) Lists() []string {
	if !strings.HasPrefix(s.Create, "list:set") {
		return nil
	}
	var names []string
	for _, m := range s.Members {
		names = append(names, strings.Fields(m)[0])
	}
	return names
}

// Sets reads and makes objects outside the tables that rules depend on. It reaches ipsets by
// executing ipset and by netlink, and nfacct objects by netlink. Neither belongs to a family or
// a table. Sets never changes or deletes an existing object. It keeps no state and may be used
// concurrently.
type Sets struct {
	path string
}

// NewSets looks for the program ipset. Without the program, every method that needs it returns
// an error that says so.
func NewSets() *Sets { return &Sets{path: lookUp("ipset")} }

// Names returns the names of all ipsets. A replay compares them with the sets that its rules
// name. It reads them from the kernel directly, because a name may contain a line break.
func (s *Sets) Names(ctx context.Context) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var numbers setNumbers
	names, err := numbers.names()
	return names, errors.Join(err, numbers.close())
}

// Save returns the named sets that exist, and their member sets, for the stored generation. It
// leaves out sets with an unsuitable name or too much text. The error names these; it may be
// nil.
func (s *Sets) Save(ctx context.Context, names []string) (map[string]Set, error) {
	found := map[string]Set{}
	var errs []error
	room := maxSetText
	names = slices.Clone(names)
	for i := 0; i < len(names); i++ {
		name := names[i]
		if _, done := found[name]; done || slices.Contains(names[:i], name) {
			continue
		}
		if !validSetName(name) {
			errs = append(errs, fmt.Errorf("ipset %q is not kept: its name cannot be restored", name))
			continue
		}
		if len(found) == maxSets {
			return found, errors.Join(append(errs, errSetTooBig)...)
		}
		text, err := s.run(ctx, &room, nil, "save", name)
		if errors.Is(err, ErrNoSet) {
			continue
		}
		set, parseErr := parseSet(name, string(text))
		if err = errors.Join(err, parseErr); err != nil {
			if ctx.Err() != nil || s.path == "" {
				return found, err
			}
			errs = append(errs, fmt.Errorf("ipset %s is not kept: %w", name, err))
			continue
		}
		found[name] = set
		names = append(names, set.Lists()...)
	}
	return found, errors.Join(errs...)
}

// parseSet reads the output of "ipset save NAME" for Save. Every line must be that set's one
// create, or an add to it. Any other line makes the output useless: then a comment of another
// owner had a newline in it.
func parseSet(name, text string) (Set, error) {
	set := Set{Name: name}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, " \n")
		if create, ok := strings.CutPrefix(line, "create "+name+" "); ok && set.Create == "" {
			set.Create = create
			continue
		}
		member, ok := strings.CutPrefix(line, "add "+name+" ")
		if !ok || set.Create == "" {
			return Set{}, fmt.Errorf("ipset printed %.80q", line)
		}
		set.Members = append(set.Members, member)
	}
	return set, set.Validate()
}

// Create makes a set that does not exist, with its members. A replay calls it for a missing set
// of a rule. It fills the set under another name and then renames it, so that no packet meets
// half a set. If a set of that name exists by now, the kernel refuses the rename: the set stays
// as it is, and the error is ErrSetStands.
func (s *Sets) Create(ctx context.Context, set Set) error {
	if err := set.Validate(); err != nil {
		return err
	}
	draft := fmt.Sprintf("%s%x", draftPrefix, time.Now().UnixNano())
	var text bytes.Buffer
	fmt.Fprintf(&text, "create %s %s\n", draft, set.Create)
	for _, m := range set.Members {
		fmt.Fprintf(&text, "add %s %s\n", draft, m)
	}
	fmt.Fprintf(&text, "rename %s %s\n", draft, set.Name)
	_, err := s.run(ctx, nil, &text, "restore")
	if err == nil {
		return nil
	}
	// After an error the draft may be left over, unless it already has its final name.
	_, _ = s.run(context.WithoutCancel(ctx), nil, nil, "destroy", draft)
	return fmt.Errorf("creating ipset %s: %w", set.Name, err)
}

// run executes ipset, for Save and Create. It subtracts the size of the output from room, the
// bytes that a Save may still read; nil means maxSetText. stdin may be nil.
func (s *Sets) run(ctx context.Context, room *int, stdin io.WriterTo, args ...string) ([]byte, error) {
	if s.path == "" {
		return nil, errors.New("ipset is not installed: install the package \"ipset\"")
	}
	var out bytes.Buffer
	most := &boundedWriter{out: &out, room: maxSetText, onFull: errSetTooBig}
	if room != nil {
		most.room = *room
	}
	res, err := command{path: s.path, args: args, stdin: stdin, stdout: most, timeout: setTimeout}.run(ctx)
	if room != nil {
		*room = most.room
	}
	return out.Bytes(), s.failure(res, err)
}

// failure returns the error of a run, or nil. Callers decide by ErrNoSet and ErrSetStands. The
// texts are those of ipset 7.17 with LC_ALL=C.
func (s *Sets) failure(res result, err error) error {
	switch text := firstLines(res.stderr); {
	case err != nil:
		return err
	case res.exit == 0:
		return nil
	case strings.Contains(text, "The set with the given name does not exist"):
		return fmt.Errorf("%w: %s", ErrNoSet, text)
	case strings.Contains(text, "a set with the new name already exists"):
		return fmt.Errorf("%w: %s", ErrSetStands, text)
	default:
		return exitError(filepath.Base(s.path), res)
	}
}

// nfnetlink's part for nfacct (linux/netfilter/nfnetlink.h and nfnetlink_acct.h).
const (
	acctNew     = 7 << 8 // NFNL_SUBSYS_ACCT, NFNL_MSG_ACCT_NEW (which is 0)
	acctName    = 1      // NFACCT_NAME
	maxAcctName = 31     // NFACCT_NAME_MAX without its NUL
	nfgenmsg    = 4      // sizeof(struct nfgenmsg)
)

// Account makes an nfacct object that counts from zero, unless there is one. A replay calls it
// before it writes a rule that names the object: the kernel refuses such a rule without it.
func (s *Sets) Account(ctx context.Context, name string) error {
	if name == "" || len(name) > maxAcctName || strings.Contains(name, "\x00") {
		return fmt.Errorf("%q cannot be the name of an nfacct object", name)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return fmt.Errorf("creating the nfacct object %s: %w", name, err)
	}
	_, err = conn.Execute(netlink.Message{
		Header: netlink.Header{Type: acctNew, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl},
		Data:   nft.AppendAttr(make([]byte, nfgenmsg), acctName, name, 1),
	})
	if err = errors.Join(err, conn.Close()); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("creating the nfacct object %s: %w", name, err)
	}
	return nil
}
