// Package wars tries the built canaryd against somebody who does not stop: who
// flushes ten times a second, or deletes hooks as soon as they are back.
//
// They are built with the tag "wars" only (make wars): they measure processor time
// against a limit, which says nothing on a machine that runs other tests beside them.
// What the limit decides is tested in virtual time, in internal/daemon.
package wars
