package daemon

import (
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
)

// An openRecord is the flush record of a loss that lasts, and the tries to answer it. iptables'
// tables and native tables have one each.
type openRecord struct {
	record   api.Flush
	noticed  time.Time
	logged   bool // the log has that it was noticed
	recorded bool // the record and the log have the lost rules
	attempts int  // tries that failed
	retry    pace.Retry
	trouble  pace.Trouble // why it lasts, for the log
	failed   error        // the last try's; nil: it did not fail
	// unkept returns the lost content, while the journal does not have it; else nil.
	unkept func() []api.TableDiff
}

// takeUnkept returns the lost content for a write to the journal; nil if that has it already.
func (o *openRecord) takeUnkept() (diff []api.TableDiff) {
	if o.unkept != nil {
		diff, o.unkept = o.unkept(), nil
	}
	return diff
}

// openRecords returns the open records of all kinds of table.
func (st *state) openRecords() (list []*openRecord) {
	if st.loss != nil {
		list = append(list, &st.loss.openRecord)
	}
	if st.native.loss != nil {
		list = append(list, &st.native.loss.openRecord)
	}
	return list
}

const flushNoticed = "Rules are being flushed"

// logNotice logs once that a loss of these tables was noticed, before the wait for the flusher: the
// log shows a flush while it happens.
func (o *openRecord) logNotice(log klog.Logger, says, tables, next string) {
	o.logged = true
	when := []any{"noticedAfter", o.noticed.Sub(o.record.Time).Round(10 * time.Microsecond)}
	if since := o.record.LastInForce; o.record.Stalled {
		when = []any{"noticedAfterAtMost", o.noticed.Sub(since).Round(10 * time.Microsecond)}
	}
	if o.recorded {
		says = "Rules that were lost before canaryd was restarted are still missing"
		when = []any{"since", o.record.Time.UTC().Format(time.RFC3339)}
	}
	log.Info(says, append([]any{"flush", o.record.ID, "tables", tables}, append(when, "next", next)...)...)
}

// logNothing logs that the rules' owners were faster than canaryd: the loss gets no record.
func (o *openRecord) logNothing(log klog.Logger) {
	log = severity.Notices(log)
	if o.record.Standby != nil {
		log = log.WithValues("standby", o.record.Standby.Text())
	}
	log.Info("canaryd read the tables again and found nothing missing", "flush", o.record.ID)
}

// fail notes why a try failed, and plans the next. err may be nil: then only the outcome shows
// the failure.
func (o *openRecord) fail(err error) {
	o.attempts++
	o.failed = err
	o.retry.Failed(err, time.Now())
	o.record.Outcome = reload.Failed
	if err != nil {
		o.record.Detail = err.Error()
	}
}

// logRetry logs why a loss of these tables lasts, and the advice. err may be nil: a try failed
// without an error. An error that lasts is logged once in a while, and each try with -v=2.
func (o *openRecord) logRetry(log klog.Logger, err error, tables string) {
	says := "Rules are still missing"
	if !o.recorded {
		says = "Rules may be missing"
	}
	if err != nil && !o.trouble.MetAgain(err, time.Now()) {
		log = log.V(2) // not a line for each try
	}
	if log.Enabled() {
		log.Error(err, says, "flush", o.record.ID, "tables", tables, "attempt", o.attempts, "retryIn", o.retry.Wait,
			"missingFor", time.Since(o.record.Time).Round(time.Millisecond), "advice", failureOf(err).advice)
	}
}
