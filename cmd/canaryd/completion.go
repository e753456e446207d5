package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// A suggestion holds the possible completions of a command.
type suggestion struct {
	command command
	flags   []*pflag.Flag // flags that help shows
	values  map[string][]string
	words   []string
}

// suggestions returns the words that a shell may complete: for all commands in help, their
// flags, values and words.
func suggestions() []suggestion {
	var all []suggestion
	for _, c := range commands() {
		if c.hidden() {
			continue
		}
		s := suggestion{command: c, values: flagValues(c), words: c.words()}
		new(options).flagSet(c).VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				s.flags = append(s.flags, f)
			}
		})
		all = append(all, s)
	}
	return all
}

func takesPath(f *pflag.Flag) bool {
	return slices.Contains([]string{"manifest", "rules-dir", "lock-file", "state-dir", "socket"}, f.Name)
}

// runCompletion prints the script for the shell that the command line names.
func runCompletion(_ context.Context, o *options, to streams) (int, error) {
	print := map[string]func([]suggestion) string{"bash": bashCompletion, "zsh": zshCompletion, "fish": fishCompletion}
	_, err := io.WriteString(to.out, print[o.word](suggestions()))
	return exitOK, err
}

// bashCompletion returns the script for bash. It does not need the package bash-completion. Bash
// splits --flag=value into three words, because = is in COMP_WORDBREAKS.
func bashCompletion(all []suggestion) string {
	var names []string
	var values, flags, words strings.Builder
	for _, s := range all {
		name := s.command.name
		names = append(names, name)
		var long []string
		for _, f := range s.flags {
			long = append(long, "--"+f.Name)
			pattern := name + "/--" + f.Name
			if f.Shorthand != "" {
				pattern += " | " + name + "/-" + f.Shorthand
			}
			switch known := s.values[f.Name]; {
			case len(known) > 0:
				fmt.Fprintf(&values, "\t%s) COMPREPLY=($(compgen -W '%s' -- \"$cur\")); return ;;\n", pattern, strings.Join(known, " "))
			case takesPath(f):
				fmt.Fprintf(&values, "\t%s) COMPREPLY=($(compgen -f -- \"$cur\")); return ;;\n", pattern)
			case f.NoOptDefVal == "":
				fmt.Fprintf(&values, "\t%s) return ;;\n", pattern)
			}
		}
		fmt.Fprintf(&flags, "\t\t%s) words='%s' ;;\n", name, strings.Join(append(long, "--help"), " "))
		if len(s.words) > 0 {
			fmt.Fprintf(&words, "\t\t%s/2) words='%s' ;;\n", name, strings.Join(s.words, " "))
		}
	}
	return fmt.Sprintf(`# Completion of canaryd for bash: canaryd completion bash
_canaryd() {
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=run words=
	if [ "$cur" = = ]; then
		cur=
	elif [ "$prev" = = ] && [ "$COMP_CWORD" -ge 2 ]; then
		prev=${COMP_WORDS[COMP_CWORD-2]}
	fi
	if [ "$COMP_CWORD" -gt 1 ]; then
		case ${COMP_WORDS[1]} in
		-*) ;;
		*) command=${COMP_WORDS[1]} ;;
		esac
	fi
	COMPREPLY=()
	case $command/$prev in
%s	esac
	case $cur in
	-*)
		case $command in
%s		esac
		;;
	*)
		case $command/$COMP_CWORD in
		run/1) words='%s' ;;
%s		esac
		;;
	esac
	COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -F _canaryd canaryd
`, values.String(), flags.String(), strings.Join(names, " "), words.String())
}

// zshCompletion returns the script for zsh: a completion function for a folder of fpath.
func zshCompletion(all []suggestion) string {
	var list, cases strings.Builder
	for _, s := range all {
		fmt.Fprintf(&list, "\t\t'%s:%s'\n", s.command.name, zshQuote(s.command.summary))
		fmt.Fprintf(&cases, "\t%s)\n\t\t_arguments", s.command.name)
		for _, f := range s.flags {
			value := ""
			switch known := s.values[f.Name]; {
			case len(known) > 0:
				value = ":value:(" + strings.Join(known, " ") + ")"
			case takesPath(f):
				value = ":path:_files"
			case f.NoOptDefVal == "":
				value = ":value:"
			}
			equals := "="
			if value == "" {
				equals = ""
			}
			_, usage := pflag.UnquoteUsage(f)
			fmt.Fprintf(&cases, " \\\n\t\t\t'--%s%s[%s]%s'", f.Name, equals, zshQuote(usage), value)
		}
		fmt.Fprint(&cases, " \\\n\t\t\t'--help[describe the command]'")
		if len(s.words) > 0 {
			fmt.Fprintf(&cases, " \\\n\t\t\t'1:word:(%s)'", strings.Join(s.words, " "))
		}
		cases.WriteString("\n\t\t;;\n")
	}
	return fmt.Sprintf(`#compdef canaryd
# Completion of canaryd for zsh: canaryd completion zsh
_canaryd() {
	local -a commands
	commands=(
%s	)
	local command=run
	if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then
		_describe command commands
		return
	fi
	if [[ $words[2] != -* ]]; then
		command=$words[2]
		shift words
		(( CURRENT-- ))
	fi
	case $command in
%s	esac
}
if [ "$funcstack[1]" = _canaryd ]; then
	_canaryd "$@"
else
	compdef _canaryd canaryd
fi
`, list.String(), cases.String())
}

// zshQuote quotes text for a specification in single quotes, in which brackets and colons are
// special.
func zshQuote(text string) string {
	return strings.NewReplacer("'", `'\''`, "[", `\[`, "]", `\]`, ":", `\:`).Replace(text)
}

// fishCompletion returns the script for fish: a list of its complete commands.
func fishCompletion(all []suggestion) string {
	var b strings.Builder
	b.WriteString("# Completion of canaryd for fish: canaryd completion fish\ncomplete -c canaryd -f\n")
	for _, s := range all {
		fmt.Fprintf(&b, "complete -c canaryd -n __fish_use_subcommand -a %s -d '%s'\n", s.command.name, fishQuote(s.command.summary))
	}
	for _, s := range all {
		when := "__fish_seen_subcommand_from " + s.command.name
		for _, f := range s.flags {
			fmt.Fprintf(&b, "complete -c canaryd -n '%s' -l %s", when, f.Name)
			if f.Shorthand != "" {
				fmt.Fprintf(&b, " -s %s", f.Shorthand)
			}
			switch known := s.values[f.Name]; {
			case len(known) > 0:
				fmt.Fprintf(&b, " -x -a '%s'", strings.Join(known, " "))
			case takesPath(f):
				b.WriteString(" -r -F")
			case f.NoOptDefVal == "":
				b.WriteString(" -x")
			}
			_, usage := pflag.UnquoteUsage(f)
			fmt.Fprintf(&b, " -d '%s'\n", fishQuote(usage))
		}
		if len(s.words) > 0 {
			fmt.Fprintf(&b, "complete -c canaryd -n '%s' -a '%s'\n", when, strings.Join(s.words, " "))
		}
	}
	return b.String()
}

func fishQuote(text string) string { return strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(text) }
