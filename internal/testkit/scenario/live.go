package scenario

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/testkit/canaryd"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	stopsIn  = 20 * time.Second
	askEvery = 20 * time.Millisecond
)

// A Record is a flush record in the output of status -o json. It is declared here, and not
// imported from internal/api, because other programs rely on this format.
type Record struct {
	ID       string            `json:"id"`
	Earlier  bool              `json:"earlier"` // of an earlier run
	Time     time.Time         `json:"time"`
	Kind     string            `json:"kind"`
	Families []rules.Family    `json:"families"`
	Tables   []rules.TableName `json:"tables"`
	Culprit  struct {
		PID     int    `json:"pid"`
		Comm    string `json:"comm"`
		Command string `json:"command"`
	} `json:"culprit"`
	Lost struct {
		Chains int `json:"chains"`
		Rules  int `json:"rules"`
		Jumps  int `json:"jumps"`
	} `json:"lost"`
	NoticedSeconds float64 `json:"noticedSeconds"`
	AbsentSeconds  float64 `json:"absentSeconds"`
	WrittenSeconds float64 `json:"writtenSeconds"` // 0: nothing was written
	KernelSeconds  float64 `json:"kernelSeconds"`
	Outcome        string  `json:"outcome"`
	Attempts       int     `json:"attempts"`
	Repeated       struct {
		Times int `json:"times"`
	} `json:"repeated"` // flushes that are counted in this record
	Detail string `json:"detail"`
}

// Replaying reports whether the record has no end yet, and waits for no person and no owner.
func (r Record) Replaying() bool { return r.Outcome == "pending" || r.Outcome == "waiting: the lock" }

// A Status has the fields of status -o json that the package needs.
type Status struct {
	Healthy    bool `json:"healthy"`
	Generation struct {
		ID    string `json:"id"`
		Rules int    `json:"rules"`
	} `json:"generation"`
	Families             map[rules.Family]map[rules.TableName]string `json:"families"`
	LearningPendingSince time.Time                                   `json:"learningPendingSince"`
	Flushes              []Record                                    `json:"flushes"`
	Standby              map[rules.Family]StandbyStatus              `json:"standby"`
	Native               []NativeStatus                              `json:"native"`
}

// Count returns the number of flushes, including those counted in another record.
func (s Status) Count() int {
	n := len(s.Flushes)
	for _, f := range s.Flushes {
		n += f.Repeated.Times
	}
	return n
}

// A NativeStatus is the state of a native table in a status.
type NativeStatus struct {
	Table      string         `json:"table"`
	Verdict    string         `json:"verdict"`
	Captured   time.Time      `json:"captured"`   // when it was last read
	Generation string         `json:"generation"` // the ID of its content
	Standby    *StandbyStatus `json:"standby"`
}

// A StandbyStatus is the state of the standby of a family or native table in a status.
type StandbyStatus struct {
	State  string `json:"state"`
	Reason string `json:"reason"`
}

// A Result is the result of one scenario while canaryd runs.
type Result struct {
	Scenario string
	Command  string
	Backend  string
	Lost     string // verdict and size, from the flush records
	Culprit  string
	// Noticed and Back are the times from the start of the flush's first command to the first
	// verdict, and to the last proof. If Do ran several times, the longest counts.
	Noticed time.Duration
	Back    time.Duration
	Records []Record
	// Problems are the reasons why the scenario failed.
	Problems []string
	// Overtaken means that canaryd wrote while the flusher's commands still ran, because they were
	// farther apart than --settle. A later command may then fail, or flush what is back.
	Overtaken bool
	// Log is the end of canaryd's log, if it failed.
	Log string
}

// A Live runs scenarios with the built canaryd and the real programs, in the namespace of this
// process. The namespace must be new, and used by nothing else.
type Live struct {
	Canaryd  string // path of the program
	Programs Programs
	Dir      string // for state, socket and log
	// Flags are further flags of canaryd run.
	Flags []string
	// Limit is the longest time of one wait. A program for people sets one, and names the
	// missing state. A test uses the rest of its time.
	Limit time.Duration

	process *canaryd.Process
	want    map[rules.Family]Want
}

// Run loads the node's rules, starts canaryd, runs the scenario and waits until all rules are
// back. An error means that it could not be tried; a failed scenario is a Result with Problems.
func (l *Live) Run(ctx context.Context, s Scenario) (result Result, err error) {
	result = Result{Scenario: s.Name, Command: s.Command, Backend: string(l.Programs.With)}
	if err := l.measureControl(ctx, s); err != nil {
		return result, fmt.Errorf("without canaryd: %w", err)
	}
	stop, err := l.start(ctx)
	if err != nil {
		return result, err
	}
	defer func() {
		result.Lost = describe(result.Records)
		if stopped := stop(); stopped != nil {
			result.Problems = append(result.Problems, "canaryd run ended with "+stopped.Error())
		}
		if len(result.Problems) > 0 || err != nil {
			result.Log = l.process.Tail()
		}
	}()
	if err := l.prepare(ctx, s); err != nil {
		return result, err
	}
	for range max(s.Times, 1) {
		if err := l.once(ctx, s, &result); err != nil || len(result.Problems) > 0 {
			return result, err
		}
	}
	result.Problems = append(result.Problems, judge(s, result.Records)...)
	return result, nil
}

// measureControl measures which foreign rules the flush leaves without canaryd. Then it loads
// the node's rules again into empty tables.
func (l *Live) measureControl(ctx context.Context, s Scenario) error {
	selector, err := protect.NewSelector(Protect)
	if err != nil {
		return err
	}
	if err := Load(ctx, l.Programs, rules.Families()...); err != nil {
		return err
	}
	if s.Prepare != nil {
		if err := s.Prepare(ctx, l.Programs); err != nil {
			return err
		}
	}
	if err := s.Do(ctx, l.Programs); err != nil {
		return err
	}
	l.want = map[rules.Family]Want{}
	for _, family := range rules.Families() {
		left, err := Tables(ctx, l.Programs, family)
		if err != nil {
			return err
		}
		l.want[family] = Want{Foreign: left, Protects: selector.Protects}
	}
	if err := Wipe(ctx, l.Programs, rules.Families()...); err != nil {
		return err
	}
	return Load(ctx, l.Programs, rules.Families()...)
}

// start starts canaryd, and returns when it has learned the node's rules.
func (l *Live) start(ctx context.Context) (stop func() error, err error) {
	flags := append(canaryd.Flags(l.Programs.With, l.Dir), "--lock-file=/run/xtables.lock")
	p, err := canaryd.Start(exec.CommandContext(ctx, l.Canaryd, append(flags, l.Flags...)...), filepath.Join(l.Dir, "canaryd.log"))
	if err != nil {
		return nil, err
	}
	l.process = p
	err = l.poll(ctx, func(ctx context.Context) (bool, error) {
		if !p.Running() {
			return false, fmt.Errorf("canaryd run ended at once: %w", p.Err())
		}
		if _, err := canaryd.Get(ctx, "/readyz"); err != nil {
			return false, nil
		}
		status, err := l.status(ctx)
		return err == nil && status.Healthy && status.Generation.Rules > 0, nil
	})
	if err != nil {
		err = fmt.Errorf("waiting for canaryd to be ready: %w\n%s", err, p.Tail())
		return nil, errors.Join(err, p.Stop(stopsIn))
	}
	return func() error { return p.Stop(stopsIn) }, nil
}

// prepare runs the scenario's Prepare, waits until canaryd has captured its rules, and saves
// the content that must exist after the flush.
func (l *Live) prepare(ctx context.Context, s Scenario) error {
	if s.Prepare != nil {
		before, err := l.status(ctx)
		if err != nil {
			return err
		}
		marks, err := l.marks(ctx)
		if err != nil {
			return err
		}
		if err := s.Prepare(ctx, l.Programs); err != nil {
			return err
		}
		err = l.poll(ctx, func(ctx context.Context) (bool, error) {
			now, err := l.status(ctx)
			if err != nil || now.Generation.ID == before.Generation.ID || !now.LearningPendingSince.IsZero() {
				return false, nil
			}
			// A file that was saved before has marks that are no longer in use.
			renewed, err := l.marks(ctx)
			return renewed != marks, err
		})
		if err != nil {
			return fmt.Errorf("waiting for canaryd to capture the preparation: %w\n%s", err, l.process.Tail())
		}
	}
	for family, want := range l.want {
		before, err := Tables(ctx, l.Programs, family)
		if err != nil {
			return err
		}
		want.Protected = before
		l.want[family] = want
	}
	return nil
}

// once flushes, and waits until all rules are back.
func (l *Live) once(ctx context.Context, s Scenario, result *Result) error {
	before, err := l.status(ctx)
	if err != nil {
		return err
	}
	var last time.Time
	if len(before.Flushes) > 0 {
		last = before.Flushes[0].Time
	}
	start := time.Now()
	if err := s.Do(ctx, l.Programs); err != nil {
		return err
	}
	end := time.Now()
	var records []Record
	// A flush of many commands makes several records. The last record exists once a look that
	// began after the flusher's end finds nothing more.
	look := false
	err = l.poll(ctx, func(ctx context.Context) (bool, error) {
		ask := l.status
		if look {
			ask = l.look
		}
		status, err := ask(ctx)
		if err != nil {
			return false, err
		}
		records = slices.DeleteFunc(status.Flushes, func(r Record) bool { return !r.Time.After(last) })
		done := status.Healthy && len(records) > 0 && !slices.ContainsFunc(records, Record.Replaying)
		looked := look
		look = done
		return done && looked, nil
	})
	slices.Reverse(records)
	result.Records = append(result.Records, records...)
	if err != nil {
		result.Problems = append(result.Problems, fmt.Sprintf("not repaired: %v; %d flush records", err, len(records)))
	}
	for i, r := range records {
		verdict := r.Time.Add(seconds(r.NoticedSeconds)).Sub(start)
		if i == 0 {
			result.Noticed = max(result.Noticed, verdict)
		}
		result.Overtaken = result.Overtaken || r.WrittenSeconds > 0 && r.Time.Add(seconds(r.WrittenSeconds)).Before(end)
		result.Back = max(result.Back, r.Time.Add(seconds(r.AbsentSeconds)).Sub(start))
		if r.Culprit.Comm != "" {
			result.Culprit = r.Culprit.Comm
		}
	}
	for _, family := range rules.Families() {
		got, err := Tables(ctx, l.Programs, family)
		if err != nil {
			return err
		}
		for _, line := range Compare(l.want[family], got) {
			result.Problems = append(result.Problems, family.String()+" "+line)
		}
	}
	return nil
}

// judge compares the flush records with the scenario's losses.
func judge(s Scenario, records []Record) []string {
	var problems []string
	for _, family := range rules.Families() {
		for _, table := range protect.Always() {
			kind := s.Lost[family.Table(table)]
			if kind == "" {
				continue
			}
			if !slices.ContainsFunc(records, func(r Record) bool {
				return slices.Contains(r.Families, family) && slices.Contains(r.Tables, table) && agrees(r.Kind, kind)
			}) {
				problems = append(problems, fmt.Sprintf("no flush record says that %s %s is %s", family, table, kind))
			}
		}
	}
	for _, r := range records {
		if r.Outcome != "proved" && r.Outcome != "raced" {
			problems = append(problems, fmt.Sprintf("the flush record of %s ended %s", r.Time.Format(time.TimeOnly), r.Outcome))
		}
	}
	return problems
}

// agrees reports whether a record's kind is the wanted one. iptables -F runs before -X, so
// canaryd may find the chains empty in between.
func agrees(kind, want string) bool {
	return kind == want || want == ChainDeleted && kind == Emptied
}

func describe(records []Record) string {
	if len(records) == 0 {
		return "nothing was noticed"
	}
	var kinds []string
	rules, chains, jumps := 0, 0, 0
	for _, r := range records {
		kinds = append(kinds, r.Kind)
		rules, chains, jumps = max(rules, r.Lost.Rules), max(chains, r.Lost.Chains), max(jumps, r.Lost.Jumps)
	}
	slices.Sort(kinds)
	return fmt.Sprintf("%s: %d rules, %d chains, %d jumps", strings.Join(slices.Compact(kinds), ","), rules, chains, jumps)
}

// mark matches the comment of canaryd's canary of a table.
var mark = regexp.MustCompile(`canaryd-canary:[0-9a-f]+`)

// marks returns the comments of canaryd's canaries of IPv4.
func (l *Live) marks(ctx context.Context) (string, error) {
	text, err := l.Programs.Save(ctx, rules.IPv4)
	return strings.Join(mark.FindAllString(text, -1), " "), err
}

// status returns canaryd's status.
func (l *Live) status(ctx context.Context) (Status, error) { return l.asked(l.client().Status(ctx)) }

// look returns canaryd's status after it has looked at all tables.
func (l *Live) look(ctx context.Context) (Status, error) { return l.asked(l.client().Look(ctx)) }

func (l *Live) client() control.Client { return control.Client{Socket: canaryd.Socket(l.Dir)} }

func (l *Live) asked(said api.Status, err error) (Status, error) {
	if err != nil {
		return Status{}, fmt.Errorf("the status of canaryd: %w", err)
	}
	return StatusOf(said)
}

// StatusOf returns a status in the form of status -o json.
func StatusOf(said api.Status) (s Status, err error) {
	text, err := json.Marshal(said)
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	return s, err
}

// poll waits until done returns true, or the limit of one wait is over.
func (l *Live) poll(ctx context.Context, done func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, l.Limit, fmt.Errorf("not within %s", l.Limit))
	defer cancel()
	for {
		if ok, err := done(ctx); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(askEvery):
		}
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
