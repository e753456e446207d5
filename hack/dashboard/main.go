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

// schema is the version of the dashboard's format, that of Grafana 10.4. Older versions can show
// it, and newer ones migrate it when they load it.
const schema = 39

// Render returns the dashboard as Grafana imports it.
func Render() ([]byte, error) {
	board := object{
		"uid": "canaryd", "title": "canaryd", "tags": []string{"canaryd", "iptables"},
		"description":   "Are the iptables rules of the nodes in force, who flushed them, and how long were they away?",
		"schemaVersion": schema, "version": 1, "editable": true, "graphTooltip": 1, "refresh": "30s",
		"time": object{"from": "now-6h", "to": "now"}, "timezone": "browser",
		"templating":  object{"list": variables()},
		"annotations": object{"list": []object{flushes()}},
		"links": []object{
			link("Runbook", "https://github.com/canaryd/canaryd/blob/main/docs/runbook.md"),
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
	instances := "label_values(canaryd_build_info, instance)"
	return []object{
		{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
		{
			"name": "instance", "label": "Node", "type": "query", "datasource": source(), "definition": instances,
			"query": object{"query": instances, "refId": "instance"}, "refresh": 2, "sort": 1,
			"multi": true, "includeAll": true, "allValue": ".*", "current": object{"text": "All", "value": "$__all"},
		},
	}
}

// flushes marks each flush in every panel.
func flushes() object {
	return object{
		"name": "Flushes", "enable": true, "iconColor": "red", "datasource": source(),
		"expr":        `changes(canaryd_flush_events_total{instance=~"$instance"}[$__interval]) > 0`,
		"titleFormat": "flush on {{instance}}", "step": "15s",
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
