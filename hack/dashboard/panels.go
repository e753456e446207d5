package main

import (
	"slices"
	"strings"
)

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

// The selectors of all expressions: the chosen clusters, jobs and nodes, and the one node of the
// lower half. A series without the label cluster belongs to all clusters.
const (
	nodes = `cluster=~"$cluster",job=~"$job",instance=~"$instance"`
	one   = `cluster=~"$cluster",job=~"$job",instance="$node"`
)

// worst is the number of nodes that a panel of all nodes names: a fleet has thousands.
const worst = "10"

// quiet is green at 0 and red above.
func quiet() [][2]any { return [][2]any{{nil, "green"}, {1, "red"}} }

// who links a node's series to its part of the dashboard, and to its flush records, which name
// the culprits.
func who() []object {
	return []object{
		{"title": "${__field.labels.instance} alone", "url": "/d/canaryd?${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}&${job:queryparam}&var-node=${__field.labels.instance}"},
		{"title": "Who did it: flush records of ${__field.labels.instance}", "url": "http://${__field.labels.instance}/", "targetBlank": true},
	}
}

func stat(title, says, unit, expr string, steps [][2]any) panel {
	return panel{title: title, kind: "stat", says: says, unit: unit, width: 4, height: 4, queries: []query{{expr, ""}}, steps: steps}
}

func graph(title, says, unit string, queries ...query) panel {
	return panel{title: title, kind: "timeseries", says: says, unit: unit, width: 12, height: 8, queries: queries}
}

// counted is a panel that shows how many times an event happened, as stacked bars.
func counted(title, says string, queries ...query) panel {
	p := graph(title, says, "none", queries...)
	p.bars, p.stack = true, true
	return p
}

// ranked is a table of only the nodes that an expression ranks highest.
func ranked(title, says, unit, expr string) panel {
	return panel{
		title: title, kind: "table", says: says, unit: unit, width: 8, height: 8, links: who(),
		queries: []query{{"sort_desc(topk(" + worst + ", " + expr + "))", "{{instance}}"}},
	}
}

// row is a heading.
func row(title string) panel { return panel{title: title, kind: "row", width: columns, height: 1} }

// age is the time since a metric's time, if the metric is set.
func age(metric, selector string) string {
	m := metric + "{" + selector + "}"
	return "(timestamp(" + m + ") - " + m + ") and " + m + " > 0"
}

// increases is the sum of a counter's increases, in whole numbers, because increase
// extrapolates. If nothing was counted it is 0, called none.
func increases(by, metric, selector string) string {
	first, _, _ := strings.Cut(by, ",")
	return "round(sum by (" + by + ") (" + increase(metric, selector) + "))" +
		` or on() label_replace(vector(0), "` + first + `", "none", "", "")`
}

// increase is a counter's increase. For Prometheus, a series that appeared meanwhile has none.
// If the node was scraped before that, the whole value counts. A node that is new to Prometheus
// has counted before.
func increase(metric, selector string) string {
	const ago = " offset $__rate_interval"
	series := metric + "{" + selector + "}"
	return "(" + series + " unless " + series + ago + ") and on (cluster, job, instance) canaryd_flush_events_total{" + selector + "}" + ago +
		" or increase(" + series + "[$__rate_interval])"
}

// panels returns all panels, in the order in which an operator on call reads them.
func panels() []panel {
	return slices.Concat(now(), history(), cost(), oneNode())
}

// now shows whether anything is wrong, and where.
func now() []panel {
	culprits := panel{
		title: "Who did it", kind: "text", width: 8, height: 8,
		text: "Processes are in no metric. They are in each node's flush records:\n\n" +
			"- click a node in the tables to the left, or open `http://NODE:9475/`, where that address can be reached\n" +
			"- on the node: `canaryd status`\n" +
			"- in the log: lines with `flush=` and `by=`\n\n" +
			"[What each alert asks for](https://github.com/canaryd/canaryd/blob/main/docs/troubleshoot.md#by-alert)",
	}
	return []panel{
		stat("Nodes with a loss", "Nodes on which protected rules are missing now.", "none",
			`count(canaryd_loss_since_timestamp_seconds{`+nodes+`} > 0) or vector(0)`, quiet()),
		stat("Longest loss now", "How long the oldest loss that is not repaired has lasted.", "s",
			`max(`+age("canaryd_loss_since_timestamp_seconds", nodes)+`) or vector(0)`,
			[][2]any{{nil, "green"}, {0.001, "orange"}, {30, "red"}}),
		stat("Flushes", "Within the time shown.", "none",
			`round(sum(increase(canaryd_flush_events_total{`+nodes+`}[$__range]))) or vector(0)`, [][2]any{{nil, "green"}, {1, "orange"}}),
		stat("Blind nodes", "Nodes of which a table has not been known for a minute, or that cannot be scraped.", "none",
			`(count(timestamp(canaryd_last_examination_timestamp_seconds{`+nodes+`}) - canaryd_last_examination_timestamp_seconds{`+nodes+`} > 60) or vector(0)) + (count(up{`+nodes+`} == 0) or vector(0))`, quiet()),
		stat("Paused or contended", "Nodes on which replays are paused, or undone by another process.", "none",
			`(sum(canaryd_paused{`+nodes+`}) + sum(canaryd_contended{`+nodes+`})) or vector(0)`, [][2]any{{nil, "green"}, {1, "orange"}}),
		stat("Rules in quarantine", "Rules that could not be put back, because something that they depend on is missing, or they are refused.", "none",
			`sum(canaryd_quarantined_rules{`+nodes+`}) or vector(0)`, quiet()),

		ranked("Flushed most", "Flushes in the time shown, of the "+worst+" nodes that had most.", "none",
			`round(sum by (instance) (increase(canaryd_flush_events_total{`+nodes+`}[$__range]))) > 0`),
		ranked("Flushed last", "The "+worst+" nodes that were flushed last.", "dateTimeFromNow",
			`(canaryd_last_flush_timestamp_seconds{`+nodes+`} > 0) * 1000`),
		culprits,
	}
}

// history shows the events in the displayed time.
func history() []panel {
	return []panel{
		counted("Flushes by kind", "Tables that were hit.", query{increases("kind", "canaryd_flushes_total", nodes), "{{kind}}"}),
		counted("Replays by result", "raced: another process wrote meanwhile. skipped: the owner was faster.",
			query{increases("result", "canaryd_replays_total", nodes), "{{result}}"}),
		graph("Time rules were absent", "From the first evidence of a loss to the proof that everything is back; and the longest losses that are not repaired.", "s",
			query{`histogram_quantile(0.5, sum by (le) (rate(canaryd_rules_absent_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "half of the repairs"},
			query{`histogram_quantile(0.99, sum by (le) (rate(canaryd_rules_absent_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "99 % of the repairs"},
			query{`max(` + age("canaryd_loss_since_timestamp_seconds", nodes) + `) or vector(0)`, "longest, still lost"}),
		graph("Tables without a canary", "Tables of all nodes in which the last probe did not find the canary.", "none",
			query{`sum by (family, table) (1 - canaryd_canary_present{` + nodes + `})`, "{{family}} {{table}}"}),
		counted("Refusals, errors, deleted flows", "Restores that were refused, by reason; errors of declared sources and of the journal; flows that were ended after a replay of nat.",
			query{increases("reason", "canaryd_restore_failures_total", nodes), "refused: {{reason}}"},
			query{increases("source", "canaryd_source_errors_total", nodes), "source {{source}}"},
			query{`round(sum(increase(canaryd_journal_errors_total{` + nodes + `}[$__rate_interval])))`, "journal not written"},
			query{`round(sum(increase(canaryd_state_errors_total{` + nodes + `}[$__rate_interval])))`, "state not written"},
			query{increases("protocol", "canaryd_conntrack_deleted_total", nodes), "flows ended: {{protocol}}"}),
		graph("States", "How many nodes are in each.", "none",
			query{`sum(canaryd_paused{` + nodes + `})`, "paused"},
			query{`sum(canaryd_contended{` + nodes + `})`, "contended"},
			query{`sum(canaryd_awaiting_decision{` + nodes + `})`, "a loss waits for a decision"},
			query{`sum(canaryd_native_tables_not_guarded{` + nodes + `})`, "native tables not guarded"},
			query{`sum(canaryd_native_table_refused{` + nodes + `}) or vector(0)`, "native tables that could not be put back"},
			query{`sum(canaryd_opaque_rules{` + nodes + `}) or vector(0)`, "rules that could not be put back"},
			query{`count(canaryd_healthy{` + nodes + `} == 0) or vector(0)`, "not healthy"},
			query{`sum(canaryd_mixed_backends{` + nodes + `})`, "both backends hold rules"},
			query{`sum(canaryd_backend_mismatch{` + nodes + `})`, "the other backend is in use"}),
		graph("Drills", "Nodes whose last drill did not pass, and nodes that had none within two weeks.", "none",
			query{`count(canaryd_last_drill_passed{` + nodes + `} == 0 and canaryd_last_drill_timestamp_seconds{` + nodes + `} > 0) or vector(0)`, "did not pass"},
			query{`count(timestamp(canaryd_last_drill_timestamp_seconds{` + nodes + `}) - canaryd_last_drill_timestamp_seconds{` + nodes + `} > 14 * 86400) or vector(0)`, "none within two weeks"}),
		graph("Standby", "How many families of all nodes are in each state, but for off; and the most changed chains that a copy lacks. canaryd status says why one is unavailable.", "none",
			query{`sum by (state) (canaryd_standby{` + nodes + `,state!="off"})`, "{{state}}"},
			query{`max(canaryd_standby_outstanding_chains{` + nodes + `}) or vector(0)`, "most chains outstanding"}),
	}
}

// cost shows canaryd's use of resources on all nodes.
func cost() []panel {
	cpu := `rate(process_cpu_seconds_total{` + nodes + `}[$__rate_interval])`
	return []panel{
		graph("Processor", "CPU time of the whole process, in cores.", "none",
			query{`quantile(0.5, ` + cpu + `)`, "half of the nodes use less"},
			query{`max(` + cpu + `)`, "the node that uses most"}),
		graph("Probes and replays", "The time that a probe takes, and a replay of one family with its proof.", "s",
			query{`histogram_quantile(0.99, sum by (le) (rate(canaryd_probe_duration_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "99 % of the probes"},
			query{`histogram_quantile(0.99, sum by (le, family) (rate(canaryd_replay_duration_seconds_bucket{` + nodes + `}[$__rate_interval])))`, "99 % of the replays, {{family}}"}),
	}
}

// oneNode shows a single node in full: the node chosen at the top.
func oneNode() []panel {
	canaries := panel{
		title: "Canaries of the node", kind: "state-timeline", says: "Whether the last probe found the canary of each table with its nonce, and whether each native table is in force.", width: 12, height: 8,
		queries: []query{{`canaryd_canary_present{` + one + `}`, "{{family}} {{table}}"},
			{`canaryd_native_table_in_force{` + one + `}`, "{{table}}"}},
		steps:    [][2]any{{nil, "red"}, {1, "green"}},
		mappings: [][2]string{{"0", "gone"}, {"1", "stands"}},
	}
	standby := panel{
		title: "Standby of the node", kind: "state-timeline", says: "The state of each family's copy of nat. canaryd status says why it is unavailable.", width: 12, height: 8,
		queries: []query{{`canaryd_standby{` + one + `} > 0`, "{{family}} {{state}}"}},
		steps:   [][2]any{{nil, "blue"}},
	}
	return []panel{
		row("One node: $node"),
		canaries,
		counted("Flushes of the node", "Tables that were hit.", query{increases("table, kind", "canaryd_flushes_total", one), "{{table}} {{kind}}"}),
		graph("Generation of the node", "Rules that are kept in force. A step down is an owner's decision, or rules that were deleted one by one.", "none",
			query{`sum by (family, table) (canaryd_generation_rules{` + one + `})`, "{{family}} {{table}}"}),
		graph("How current the node is", "How long ago the tables were last known, and how far the generation lags behind their owners.", "s",
			query{`timestamp(canaryd_last_examination_timestamp_seconds{` + one + `}) - canaryd_last_examination_timestamp_seconds{` + one + `}`, "last known"},
			query{age("canaryd_capture_pending_since_timestamp_seconds", one), "generation lags"}),
		graph("Reasons to look at the node", "Hints a second: commits, released locks, polls, and lost notifications.", "ops",
			query{`sum by (source) (rate(canaryd_hints_total{` + one + `}[$__rate_interval]))`, "{{source}}"}),
		graph("Memory of the node's canaryd", "Resident memory of the process.", "bytes",
			query{`process_resident_memory_bytes{` + one + `}`, "resident"}),
		standby,
		graph("Translated by the node's standby", "For how long, in the place of rules that were missing.", "s",
			query{`sum by (family) (` + increase("canaryd_standby_open_seconds_total", one) + `) or on() label_replace(vector(0), "family", "none", "", "")`, "{{family}}"}),
	}
}

// object returns the panel in Grafana's format, without its place.
func (p panel) object() object {
	o := object{"title": p.title, "type": p.kind}
	if p.says != "" {
		o["description"] = p.says
	}
	if p.kind == "row" {
		o["collapsed"], o["panels"] = false, []object{}
		return o
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
	if p.unit == "none" && p.kind != "stat" && p.title != "Processor" {
		defaults["decimals"] = 0 // whole numbers on the axis too
	}
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
