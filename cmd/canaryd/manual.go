package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"github.com/canaryd/canaryd/internal/api"
)

// runManual prints canaryd(8); the repository and the packages contain it as a file.
func runManual(_ context.Context, _ *options, to streams) (int, error) {
	_, err := io.WriteString(to.out, manual())
	return exitOK, err
}

// manualDate is when the text in manual was last changed.
const manualDate = "2026-11-28"

// manual returns the manual page in the man(7) language, with the texts of help.
func manual() string {
	var b strings.Builder
	b.WriteString(`.\" Made by "canaryd man"; do not edit.
.TH CANARYD 8 ` + manualDate + ` canaryd
.SH NAME
canaryd \- notices when a process flushes iptables rules, puts them back, and proves it
.SH SYNOPSIS
.B canaryd
.RI [ command ]
.RI [ flags ]
.SH DESCRIPTION
canaryd watches iptables' tables of IPv4 and IPv6, on iptables-nft and iptables-legacy, and the native nftables tables that --protect names.
After a flush it puts the protected rules back within milliseconds, and reads them again as a proof. It reports which rules were lost, by which process and for
how long.
.PP
Without a command it is the daemon.
.SH COMMANDS
`)
	for _, c := range commands() {
		if c.hidden() {
			continue
		}
		fmt.Fprintf(&b, ".SS canaryd %s%s\n%s.\n", c.name, roff(wordsOf(c)), roff(api.Upper(c.summary)))
		if c.about != "" {
			fmt.Fprintf(&b, ".PP\n%s", roffLines(c.about))
		}
		new(options).flagSet(c).VisitAll(func(f *pflag.Flag) {
			if !f.Hidden { // run's hidden flags are the generator's, see render, and klog's
				writeFlag(&b, f)
			}
		})
	}
	b.WriteString(`.SH FILES
.TP
.I /etc/default/canaryd
CANARYD_FLAGS, the flags of the daemon under systemd.
.TP
.I /run/canaryd/canaryd.sock
The control socket, for root and the user that the daemon runs as.
.TP
.I /var/lib/canaryd
The stored generations, and journal.jsonl with a line of JSON for each flush. journal.1.jsonl has the older
lines.
.TP
.I /run/xtables.lock
The lock that programs that write iptables rules share.
.SH SIGNALS
SIGTERM and SIGINT end the daemon; canaries and rules stay in place.
.SH EXIT STATUS
0 is yes, 1 is no and 2 is trouble or wrong usage; each command states its question.
.SH SEE ALSO
.BR iptables (8),
.BR nft (8),
.BR systemd.service (5)
`)
	return b.String()
}

// writeFlag writes one flag with its usage and default, in the man(7) language.
func writeFlag(b *strings.Builder, f *pflag.Flag) {
	value, usage := pflag.UnquoteUsage(f)
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	fmt.Fprintf(b, ".TP\n.B %s", roff(name))
	if value != "" {
		fmt.Fprintf(b, " \\fI%s\\fR", roff(value))
	}
	fmt.Fprintf(b, "\n%s", roff(usage)) // not as a sentence: it may begin with a value
	if d := f.DefValue; d != "" && d != "false" && d != "[]" && d != "0" {
		fmt.Fprintf(b, " (default %s)", roff(d))
	}
	b.WriteString("\n")
}

// wordsOf returns the words that a command takes, for its heading; "" if there are none.
func wordsOf(c command) string {
	if words := c.words(); len(words) > 0 {
		return " [" + strings.Join(words, "|") + "]"
	}
	return ""
}

// roff escapes text for roff: backslashes, hyphens, and a control character at the start of a line.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}

// roffLines escapes text and begins a line for each sentence, as roff expects.
func roffLines(text string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.ReplaceAll(strings.Join(strings.Fields(text), " "), ". ", ".\n") + "\n") {
		b.WriteString(roff(line))
	}
	return b.String()
}
