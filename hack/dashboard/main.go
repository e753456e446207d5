// Dashboard prints deploy/grafana/canaryd.json, the Grafana dashboard. It is generated so that all
// panels select nodes in the same way. `make dashboard` writes the file.
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

func main() {
	os.Exit(run())
}

func run() int {
	text, err := Render()
	if err == nil {
		_, err = os.Stdout.Write(text)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		return 1
	}
	return 0
}

// object is a JSON object; encoding/json sorts its keys.
type object = map[string]any

// schema is the version of the dashboard's format: that of Grafana 10.4. Older versions can
// show it, and newer ones migrate it when they load it.
const schema = 39

// Render returns the dashboard in the form that Grafana imports.
func Render() ([]byte, error) {
	board := object{
		"uid": "canaryd", "title": "canaryd", "tags": []string{"canaryd", "iptables"},
		"description":   "Are the iptables rules of the nodes in force, who flushed them, and how long were they away?",
		"schemaVersion": schema, "version": 1, "editable": true, "graphTooltip": 1, "refresh": "30s",
		"time": object{"from": "now-6h", "to": "now"}, "timezone": "browser",
		"templating":  object{"list": variables()},
		"annotations": object{"list": []object{flushes()}},
		"links": []object{
			link("Runbook", "https://github.com/canaryd/canaryd/blob/main/docs/troubleshoot.md#by-alert"),
			link("Metrics", "https://github.com/canaryd/canaryd/blob/main/docs/metrics.md"),
		},
		"panels": place(panels()),
	}
	text, err := json.MarshalIndent(board, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encoding the dashboard: %w", err)
	}
	return append(text, '\n'), nil
}

// source is the data source that the user chose at the top of the dashboard.
func source() object { return object{"type": "prometheus", "uid": "${datasource}"} }

func variables() []object {
	const chosen = `canaryd_build_info{cluster=~"$cluster",job=~"$job"}`
	node := choice("node", "One node", "label_values("+chosen+", instance)")
	all := func(name, label, query string) object {
		v := choice(name, label, query)
		v["multi"], v["includeAll"], v["allValue"], v["current"] = true, true, ".*", object{"text": "All", "value": "$__all"}
		return v
	}
	return []object{
		{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
		all("cluster", "Cluster", "label_values(canaryd_build_info, cluster)"),
		all("job", "Job", `label_values(canaryd_build_info{cluster=~"$cluster"}, job)`),
		all("instance", "Nodes", "label_values("+chosen+", instance)"),
		node,
	}
}

// choice is a variable with one value of a query: the first, until the user chooses.
func choice(name, label, query string) object {
	return object{
		"name": name, "label": label, "type": "query", "datasource": source(), "definition": query,
		"query": object{"query": query, "refId": name}, "refresh": 2, "sort": 1,
	}
}

// flushes marks the flushes in every panel, with one mark for all nodes, because a job that
// flushes a fleet would draw thousands.
func flushes() object {
	return object{
		"name": "Flushes", "enable": true, "iconColor": "red", "datasource": source(),
		"expr":        `sum(changes(canaryd_flush_events_total{` + nodes + `}[$__interval])) > 0`,
		"titleFormat": "flushes", "step": "15s",
	}
}

func link(title, url string) object {
	return object{"title": title, "url": url, "type": "link", "icon": "doc", "targetBlank": true}
}

// columns is the width of Grafana's grid.
const columns = 24

// place numbers the panels and arranges them from left to right, row by row. All panels of a row
// have the same height.
func place(list []panel) []object {
	var placed []object
	x, y := 0, 0
	for i, p := range list {
		if x+p.width > columns {
			x, y = 0, y+list[i-1].height
		}
		o := p.object()
		o["id"] = i + 1
		o["gridPos"] = object{"x": x, "y": y, "w": p.width, "h": p.height}
		placed = append(placed, o)
		x += p.width
	}
	return placed
}
