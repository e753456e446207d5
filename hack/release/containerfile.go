package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

var (
	comment   = regexp.MustCompile(`(?m)^#.*\n`)
	goesOn    = regexp.MustCompile(`\\\n\s*`)
	labelPair = regexp.MustCompile(`^([a-z.]+)="([^"]*)"\s*`)
)

// imageConfig reads the image's configuration from the last stage of a Containerfile, so that
// an engine and this program make the same image. args are the values of its ARGs. An unknown
// instruction is an error.
func imageConfig(text string, args map[string]string) (v1.Config, error) {
	var config v1.Config
	for name, value := range args {
		text = strings.ReplaceAll(text, "${"+name+"}", value)
	}
	text = goesOn.ReplaceAllString(comment.ReplaceAllString(text, ""), "")
	last := strings.LastIndex(text, "\nFROM scratch\n")
	if last < 0 {
		return config, fmt.Errorf("the image is not made from scratch")
	}
	for line := range strings.Lines(text[last+1:]) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		var err error
		switch word {
		case "", "FROM", "ARG", "COPY":
		case "LABEL":
			config.Labels, err = labels(rest)
		case "ENV":
			config.Env = append(config.Env, rest)
		case "USER":
			config.User = rest
		case "ENTRYPOINT":
			err = json.Unmarshal([]byte(rest), &config.Entrypoint)
		case "CMD":
			err = json.Unmarshal([]byte(rest), &config.Cmd)
		default:
			err = fmt.Errorf("the instruction is not known here")
		}
		if err != nil {
			return config, fmt.Errorf("%s: %w", strings.TrimSpace(line), err)
		}
	}
	if len(config.Entrypoint) == 0 {
		return config, fmt.Errorf("there is no ENTRYPOINT")
	}
	return config, nil
}

func labels(text string) (map[string]string, error) {
	all := map[string]string{}
	for text != "" {
		pair := labelPair.FindStringSubmatch(text)
		if pair == nil {
			return nil, fmt.Errorf("no label: %q", text)
		}
		all[pair[1]] = pair[2]
		text = text[len(pair[0]):]
	}
	return all, nil
}
