package main

// A panel is one panel of the dashboard.
type panel struct {
	title, kind, unit string
	says              string // a description, shown next to the title
	width, height     int
	queries           []query
	stack             bool
	bars              bool
	text              string      // of a panel of kind text
	steps             [][2]any    // thresholds: the value from which a colour is used; the first has nil
	mappings          [][2]string // values and the words that replace them
	links             []object
}

// A query is an expression, and the name of its series.
type query struct{ expr, legend string }

// nodes is the selector of each expression.
const nodes = `instance=~"$instance"`

// quiet is green at 0 and red above.
func quiet() [][2]any { return [][2]any{{nil, "green"}, {1, "red"}} }

// who links a node's series to its flush records, which name the culprits.
func who() []object {
	return []object{
		{"title": "Who did it: flush records of ${__field.labels.instance}", "url": "http://${__field.labels.instance}/", "targetBlank": true},
		{"title": "The same as JSON", "url": "http://${__field.labels.instance}/api/v1/status", "targetBlank": true},
	}
}

func stat(title, says, unit, expr string, steps [][2]any) panel {
	return panel{title: title, kind: "stat", says: says, unit: unit, width: 4, height: 4, queries: []query{{expr, ""}}, steps: steps}
}

func graph(title, says, unit string, queries ...query) panel {
	return panel{title: title, kind: "timeseries", says: says, unit: unit, width: 12, height: 8, queries: queries}
}

// counted is a panel that shows how often something happened, as stacked bars.
func counted(title, says string, queries ...query) panel {
	p := graph(title, says, "short", queries...)
	p.bars, p.stack = true, true
	return p
}

// panels returns all panels, in the order in which an operator on call reads them.
func panels() []panel {
	flushKinds := counted("Flushes by kind and node", "Tables that were hit. Click a bar for the flush records of its node.",
		query{`sum by (instance, kind) (increase(canaryd_flushes_total{` + nodes + `}[$__rate_interval])) > 0`, "{{instance}} {{kind}}"})
	flushKinds.links = who()

	last := panel{
		title: "Last flush", kind: "table", says: "Click a node for its flush records.", unit: "dateTimeFromNow", width: 8, height: 8,
		queries: []query{{`sort_desc((canaryd_last_flush_timestamp_seconds{` + nodes + `} > 0) * 1000)`, "{{instance}}"}}, links: who(),
	}
	culprits := panel{
		title: "Who did it", kind: "text", width: 4, height: 8,
		text: "Processes are in no metric. They are in each node's flush records:\n\n" +
			"- click a bar or a node in the panels to the left, or open `http://NODE:9475/`, where that address can be reached\n" +
			"- on the node: `canaryd status`\n" +
			"- in the log: lines with `flush=` and `by=`\n\n" +
			"[What each alert asks for](https://github.com/canaryd/canaryd/blob/main/docs/runbook.md)",
	}

	canaries := panel{
		title: "Canaries", kind: "state-timeline", says: "Whether the last probe found the canary of each table with its nonce, and whether each native table is in force.", width: 12, height: 8,
		queries: []query{{`canaryd_canary_present{` + nodes + `}`, "{{instance}} {{family}} {{table}}"},
			{`canaryd_native_table_in_force{` + nodes + `}`, "{{instance}} {{table}}"}},
		steps:    [][2]any{{nil, "red"}, {1, "green"}},
		mappings: [][2]string{{"0", "gone"}, {"1", "stands"}},
	}
	return []panel{
		stat("Nodes with a loss", "Nodes on which protected rules are missing now.", "short",
			`count(canaryd_loss_since_timestamp_seconds{`+nodes+`} > 0) or vector(0)`, quiet()),
		stat("Longest loss now", "How long the oldest loss that is not repaired has lasted.", "s",
			`max((timestamp(canaryd_loss_since_timestamp_seconds{`+nodes+`}) - canaryd_loss_since_timestamp_seconds{`+nodes+`}) and canaryd_loss_since_timestamp_seconds{`+nodes+`} > 0) or vector(0)`,
			[][2]any{{nil, "green"}, {0.001, "orange"}, {30, "red"}}),
		stat("Flushes", "Within the time shown.", "short",
			`round(sum(increase(canaryd_flush_events_total{`+nodes+`}[$__range])))`, [][2]any{{nil, "green"}, {1, "orange"}}),
		stat("Blind nodes", "Nodes of which a table has not been known for a minute, or that cannot be scraped.", "short",
			`(count(timestamp(canaryd_last_examination_timestamp_seconds{`+nodes+`}) - canaryd_last_examination_timestamp_seconds{`+nodes+`} > 60) or vector(0)) + (count(up{job=~".*canaryd.*",`+nodes+`} == 0) or vector(0))`, quiet()),
		stat("Paused or contended", "Nodes on which replays are paused, or undone by another process.", "short",
			`sum(canaryd_paused{`+nodes+`}) + sum(canaryd_contended{`+nodes+`})`, [][2]any{{nil, "green"}, {1, "orange"}}),
		stat("Rules in quarantine", "Rules that could not be put back, because something that they depend on is missing, or they are refused.", "short",
			`sum(canaryd_quarantined_rules{`+nodes+`})`, quiet()),

		flushKinds, last, culprits,

		graph("Time rules were absent", "From the first evidence of a loss to the proof that everything is back; and the age of a loss that is not repaired.", "s",
			query{`histogram_quantile(0.5, sum by (le) (rate(canaryd_rules_absent_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "half of the repairs"},
			query{`histogram_quantile(0.99, sum by (le) (rate(canaryd_rules_absent_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "99 % of the repairs"},
			query{`(timestamp(canaryd_loss_since_timestamp_seconds{` + nodes + `}) - canaryd_loss_since_timestamp_seconds{` + nodes + `}) and canaryd_loss_since_timestamp_seconds{` + nodes + `} > 0`, "{{instance}}, still lost"}),
		counted("Replays by result", "raced: another process wrote meanwhile. skipped: the owner was faster.",
			query{`sum by (result) (increase(canaryd_replays_total{` + nodes + `}[$__rate_interval]))`, "{{result}}"}),

		canaries,
		graph("Generation", "Rules that are kept in force. A step down is an owner's decision, or rules that were deleted one by one.", "short",
			query{`sum by (instance) (canaryd_generation_rules{` + nodes + `})`, "{{instance}}"}),

		graph("Probe cost", "The time of a probe, and the CPU time of the whole process in cores.", "s",
			query{`sum(rate(canaryd_probe_duration_seconds_sum{` + nodes + `}[$__rate_interval])) / sum(rate(canaryd_probe_duration_seconds_count{` + nodes + `}[$__rate_interval]))`, "a probe, on average"},
			query{`histogram_quantile(0.99, sum by (le) (rate(canaryd_probe_duration_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "99 % of the probes"},
			query{`max by (instance) (rate(process_cpu_seconds_total{job=~".*canaryd.*",` + nodes + `}[$__rate_interval]))`, "{{instance}}: CPU seconds per second"}),
		graph("Replay duration", "A replay of one family, its proof included.", "s",
			query{`histogram_quantile(0.99, sum by (le, family) (rate(canaryd_replay_duration_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "{{family}}, 99 %"}),

		graph("How current", "How long ago the tables were last known, and how far the generation lags behind their owners.", "s",
			query{`timestamp(canaryd_last_examination_timestamp_seconds{` + nodes + `}) - canaryd_last_examination_timestamp_seconds{` + nodes + `}`, "{{instance}}: last known"},
			query{`(timestamp(canaryd_capture_pending_since_timestamp_seconds{` + nodes + `}) - canaryd_capture_pending_since_timestamp_seconds{` + nodes + `}) and canaryd_capture_pending_since_timestamp_seconds{` + nodes + `} > 0`, "{{instance}}: generation lags"}),
		counted("Refusals, errors, deleted flows", "Restores that were refused, by reason; errors of declared sources and of the journal; flows that were ended after a replay of nat.",
			query{`sum by (reason) (increase(canaryd_restore_failures_total{` + nodes + `}[$__rate_interval])) > 0`, "refused: {{reason}}"},
			query{`sum by (source) (increase(canaryd_source_errors_total{` + nodes + `}[$__rate_interval])) > 0`, "source {{source}}"},
			query{`sum by (instance) (increase(canaryd_journal_errors_total{` + nodes + `}[$__rate_interval])) > 0`, "{{instance}}: journal not written"},
			query{`sum by (protocol) (increase(canaryd_conntrack_deleted_total{` + nodes + `}[$__rate_interval])) > 0`, "flows ended: {{protocol}}"}),

		graph("Reasons to look", "Hints a second: commits, released locks, polls, and lost notifications.", "ops",
			query{`sum by (source) (rate(canaryd_hints_total{` + nodes + `}[$__rate_interval]))`, "{{source}}"}),
		graph("States", "1 while a node is in this state.", "short",
			query{`canaryd_paused{` + nodes + `} > 0`, "{{instance}}: paused"},
			query{`canaryd_contended{` + nodes + `} > 0`, "{{instance}}: contended"},
			query{`canaryd_awaiting_decision{` + nodes + `} > 0`, "{{instance}}: a loss waits for a decision"},
			query{`canaryd_native_tables_not_guarded{` + nodes + `} > 0`, "{{instance}}: native tables not guarded"},
			query{`canaryd_native_table_refused{` + nodes + `} > 0`, "{{instance}}: {{table}} could not be put back"},
			query{`canaryd_mixed_backends{` + nodes + `} > 0`, "{{instance}}: both backends hold rules"},
			query{`canaryd_backend_mismatch{` + nodes + `} > 0`, "{{instance}}: the other backend is in use"}),
	}
}

// object returns the panel in Grafana's format, without its place.
func (p panel) object() object {
	o := object{"title": p.title, "type": p.kind}
	if p.says != "" {
		o["description"] = p.says
	}
	if p.kind == "text" {
		o["options"] = object{"mode": "markdown", "content": p.text}
		return o
	}
	o["datasource"] = source()
	instant := p.kind == "stat" || p.kind == "table"
	var targets []object
	for i, q := range p.queries {
		target := object{"refId": string(rune('A' + i)), "datasource": source(), "expr": q.expr, "legendFormat": q.legend, "instant": instant, "range": !instant}
		if p.kind == "table" {
			target["format"] = "table"
		}
		targets = append(targets, target)
	}
	o["targets"] = targets
	defaults := object{"unit": p.unit, "custom": p.custom()}
	if p.steps != nil {
		defaults["color"] = object{"mode": "thresholds"}
		defaults["thresholds"] = object{"mode": "absolute", "steps": steps(p.steps)}
	}
	if len(p.mappings) > 0 {
		defaults["mappings"] = []object{{"type": "value", "options": words(p.mappings)}}
	}
	if len(p.links) > 0 {
		defaults["links"] = p.links
	}
	o["fieldConfig"] = object{"defaults": defaults, "overrides": []object{}}
	o["options"] = p.options()
	if p.kind == "table" {
		o["transformations"] = []object{{"id": "filterFieldsByName", "options": object{"include": object{"names": []string{"instance", "Value"}}}}}
	}
	return o
}

// custom returns the options that only this kind of panel has.
func (p panel) custom() object {
	switch {
	case p.kind != "timeseries":
		return object{}
	case p.bars:
		return object{"drawStyle": "bars", "fillOpacity": 80, "lineWidth": 0, "stacking": object{"mode": map[bool]string{true: "normal", false: "none"}[p.stack]}}
	default:
		return object{"drawStyle": "line", "fillOpacity": 10, "lineWidth": 1, "showPoints": "auto", "spanNulls": false}
	}
}

func (p panel) options() object {
	switch p.kind {
	case "stat":
		return object{"colorMode": "background", "graphMode": "none", "reduceOptions": object{"calcs": []string{"lastNotNull"}}}
	case "timeseries":
		return object{"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi", "sort": "desc"}}
	case "state-timeline":
		return object{"mergeValues": true, "showValue": "never", "rowHeight": 0.8}
	default:
		return object{"showHeader": true}
	}
}

func steps(list [][2]any) []object {
	var all []object
	for _, s := range list {
		all = append(all, object{"value": s[0], "color": s[1]})
	}
	return all
}

func words(list [][2]string) object {
	all := object{}
	for i, w := range list {
		all[w[0]] = object{"text": w[1], "index": i}
	}
	return all
}
