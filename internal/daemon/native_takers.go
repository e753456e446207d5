package daemon

import (
	"path"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// onlyTook reports whether a commit may have taken the table's lost parts, and wrote nothing. Of a
// table that is left out canaryd knows which parts these are.
func (t *nativeTable) onlyTook(deed nativeDeed) bool {
	return deed.took() && deed.New == 0 && (t.out == nil || t.finding.Took(deed.Deed))
}

// takersOf returns the processes that took a table's lost parts, for the record. That is the
// author of the last commit that deleted it. Else these are the authors of commits that only
// took something, or made the table dormant. A commit that made the table again counts only if
// that replaced it. Missed commits, unknown processes, and commits since the table was found lost
// are left out.
func (d *Daemon) takersOf(t *nativeTable) (by []watch.Writer) {
	var taken []nft.Commit
	for _, deed := range t.deeds {
		switch {
		case t.foundAt != 0 && nft.Newer(deed.Genid, t.foundAt):
		case deed.Deleted && deed.Made != 0 && t.finding.Verdict != native.Replaced:
			if t.finding.Verdict == native.Emptied { // later commits took its rules
				taken = nil
			}
		case deed.Deleted:
			taken = []nft.Commit{deed.commit}
		case t.finding.Verdict == native.Emptied && t.onlyTook(deed),
			t.finding.Verdict == native.Disabled && deed.Made != 0:
			taken = append(taken, deed.commit)
		}
	}
	for _, c := range taken {
		if w := d.cfg.Writers.Of(c); w.PID != 0 {
			by = append(by, w)
		}
	}
	return by
}

// committer says how a commit's process is related to the table; native.Judge decides by it
// whether a loss is the owner's doing. It is the owner if it or its parent has an owner's name.
// It is not the owner if its unit loads rules from a file. It is a stranger if a shell or an
// agent executed nft, with no owner behind it.
func (d *Daemon) committer(id tableid.TableID, c nft.Commit) native.Committer {
	if native.IsDrill(id) { // canaryd's own writer is not heard
		return native.NotOwner
	}
	w := d.cfg.Writers.Of(c)
	writers := owners.WritersOf(id)
	isOwner := func(comm string) bool { return slices.Contains(writers, comm) }
	switch {
	case w.IsOrChildOf(isOwner):
		return native.Owner
	case owners.LoadsFile(w.Origin.Unit) && w.Origin.Container == (watch.Container{}):
		return native.NotOwner
	case w.Comm == "nft" && w.Doer().Commands() && !slices.ContainsFunc(w.Origin.Ancestors, isOwner) && !slices.ContainsFunc(w.Doer().Ancestors, isOwner):
		return native.Shell
	}
	return native.UnknownCommitter
}

// deletesByName reports whether a process ran nft to delete a rule, chain, set, map or elements
// that it names. The judge takes that for a decision, and not for a flush (Deed.ByName). A
// deletion of a whole table does not count. command is the committer's command line.
func deletesByName(command string) bool {
	words := strings.Fields(command)
	if len(words) == 0 || path.Base(words[0]) != "nft" {
		return false
	}
	words = slices.DeleteFunc(words[1:], func(w string) bool { return strings.HasPrefix(w, "-") })
	return len(words) > 1 && (words[0] == "delete" || words[0] == "destroy") &&
		slices.Contains([]string{"rule", "chain", "set", "map", "element"}, words[1])
}
