package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	step = time.Second
	// rateInterval is four scrapes, as in Grafana.
	rateInterval = "4s"
)

// A board is the part of the dashboard that is drawn.
type board struct {
	Title  string  `json:"title"`
	Panels []panel `json:"panels"`
}

type panel struct {
	Title   string                   `json:"title"`
	Type    string                   `json:"type"`
	GridPos struct{ X, Y, W, H int } `json:"gridPos"`
	Targets []struct {
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
	} `json:"targets"`
	FieldConfig struct {
		Defaults struct {
			Unit   string `json:"unit"`
			Custom struct {
				DrawStyle string `json:"drawStyle"`
			} `json:"custom"`
			Thresholds struct {
				Steps []struct {
					Value *float64 `json:"value"`
					Color string   `json:"color"`
				} `json:"steps"`
			} `json:"thresholds"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
	Options struct {
		Content string `json:"content"`
	} `json:"options"`
}

func readBoard(path string) (board, error) {
	var b board
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &b)
	}
	return b, err
}

// A series is a result of Prometheus: values by seconds since the begin.
type series struct {
	name   string
	points [][2]float64
}

// ask queries Prometheus for all series of a panel.
func ask(ctx context.Context, p panel, begin, end time.Time) ([]series, error) {
	var all []series
	for _, t := range p.Targets {
		expr := strings.NewReplacer("$__rate_interval", rateInterval, "$__range", fmt.Sprintf("%ds", int(end.Sub(begin).Seconds())),
			"$instance", ".*").Replace(t.Expr)
		q := url.Values{"query": {expr}, "start": {stamp(begin)}, "end": {stamp(end)}, "step": {strconv.Itoa(int(step.Seconds()))}}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9090/api/v1/query_range?"+q.Encode(), nil)
		if err != nil {
			return nil, err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return nil, err
		}
		var answer struct {
			Status, Error string
			Data          struct {
				Result []struct {
					Metric map[string]string
					Values [][2]any
				}
			}
		}
		err = json.NewDecoder(response.Body).Decode(&answer)
		response.Body.Close()
		if err != nil || answer.Status != "success" {
			return nil, fmt.Errorf("%s: Prometheus answers %q: %v", p.Title, answer.Error, err)
		}
		for _, r := range answer.Data.Result {
			s := series{name: t.LegendFormat}
			for k, v := range r.Metric {
				s.name = strings.ReplaceAll(s.name, "{{"+k+"}}", v)
			}
			for _, v := range r.Values {
				at, _ := v[0].(float64)
				text, _ := v[1].(string)
				if value, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(value) {
					s.points = append(s.points, [2]float64{at - float64(begin.UnixMilli())/1e3, value})
				}
			}
			all = append(all, s)
		}
	}
	return all, nil
}

func stamp(t time.Time) string { return fmt.Sprintf("%.3f", float64(t.UnixMilli())/1e3) }

// A drawing is a panel on the page.
type drawing struct {
	Title, Colour, Number, Text string
	Style                       template.CSS
	SVG                         template.HTML
	Legend                      []entry
}

type entry struct{ Name, Colour string }

var page = template.Must(template.New("page").Parse(`<!DOCTYPE html><meta charset="utf-8"><title>canaryd</title><style>
body { background: #111217; color: #ccccdc; font: 13px/1.35 "DejaVu Sans", sans-serif; margin: 12px; }
.grid { display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: 29px; gap: 6px; }
.panel { background: #181b1f; border: 1px solid #2c2f36; border-radius: 3px; padding: 6px 10px; overflow: hidden; display: flex; flex-direction: column; }
h2 { font-size: 13px; font-weight: 500; margin: 0 0 4px; }
svg { flex: 1; min-height: 0; width: 100%; }
.number { font-size: 34px; flex: 1; display: flex; align-items: center; justify-content: center; color: #fff; border-radius: 3px; }
.legend span { margin-right: 12px; font-size: 11px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 3px; margin-right: 4px; vertical-align: middle; }
pre { white-space: pre-wrap; font: inherit; font-size: 12px; margin: 0; }
text { fill: #9a9bab; font-size: 11px; }
</style><div class="grid">{{range .}}<div class="panel" style="{{.Style}}"><h2>{{.Title}}</h2>
{{if .Number}}<div class="number" style="background:{{.Colour}}">{{.Number}}</div>{{end}}{{if .Text}}<pre>{{.Text}}</pre>{{end}}{{.SVG}}
<div class="legend">{{range .Legend}}<span><i style="background:{{.Colour}}"></i>{{.Name}}</span>{{end}}</div></div>{{end}}</div>`))

var (
	colours = []string{"#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#ffa6b0"}
	named   = map[string]string{
		"green": "#37872d", "orange": "#e0752d", "red": "#c4162a",
		"proved": "#73bf69", "raced": "#f2cc0c", "partial": "#e0752d", "failed": "#c4162a", "skipped": "#6e7079",
	}
)

// draw returns the page. A panel with a graph must have a series in Prometheus, except those in
// mayBeEmpty.
func draw(ctx context.Context, b board, begin, end time.Time) ([]byte, error) {
	mayBeEmpty := []string{"Refusals, errors, deleted flows"}
	var all []drawing
	for _, p := range b.Panels {
		d := drawing{Title: p.Title, Style: template.CSS(fmt.Sprintf("grid-column:%d/span %d;grid-row:%d/span %d", p.GridPos.X+1, p.GridPos.W, p.GridPos.Y+1, p.GridPos.H))}
		list, err := ask(ctx, p, begin, end)
		if err != nil {
			return nil, err
		}
		if len(list) == 0 && p.Type != "text" && !slices.Contains(mayBeEmpty, p.Title) {
			return nil, fmt.Errorf("%q has no data", p.Title)
		}
		switch p.Type {
		case "text":
			d.Text = strings.NewReplacer("`", "", "\n\n- ", "\n- ").Replace(p.Options.Content)
		case "stat":
			v := list[0].points[len(list[0].points)-1][1]
			d.Number = amount(v, p.FieldConfig.Defaults.Unit)
			for _, s := range p.FieldConfig.Defaults.Thresholds.Steps {
				if s.Value == nil || v >= *s.Value {
					d.Colour = named[s.Color]
				}
			}
		case "table":
			for _, s := range list {
				at := time.UnixMilli(int64(s.points[len(s.points)-1][1]))
				d.Text += fmt.Sprintf("%s    %s ago\n", s.name, end.Sub(at).Round(time.Second))
			}
		case "state-timeline":
			d.SVG = timeline(list, end.Sub(begin).Seconds())
		default:
			d.SVG, d.Legend = graph(p, list, end.Sub(begin).Seconds())
		}
		all = append(all, d)
	}
	var out bytes.Buffer
	err := page.Execute(&out, all)
	return out.Bytes(), err
}

// The size of a graph, and what is left of it for the axes.
const width, height, left, bottom = 700.0, 190.0, 60.0, 18.0

func graph(p panel, list []series, seconds float64) (template.HTML, []entry) {
	bars := p.FieldConfig.Defaults.Custom.DrawStyle == "bars"
	sums, most := map[int]float64{}, 0.0
	for _, s := range list {
		for _, pt := range s.points {
			top := pt[1]
			if bars {
				sums[int(pt[0])] += pt[1]
				top = sums[int(pt[0])]
			}
			most = max(most, top)
		}
	}
	if most == 0 {
		most = 1
	}
	most *= 1.08
	x := func(t float64) float64 { return left + t/seconds*(width-left) }
	y := func(v float64) float64 { return (height - bottom) * (1 - v/most) }
	var svg strings.Builder
	axes(&svg, seconds, x)
	for i := range 4 {
		v := most * float64(i) / 4
		fmt.Fprintf(&svg, `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="#2c2f36"/><text x="%.1f" y="%.1f" text-anchor="end">%s</text>`,
			left, width, y(v), y(v), left-5, y(v)+3, amount(v, p.FieldConfig.Defaults.Unit))
	}
	var legend []entry
	base := map[int]float64{}
	for i, s := range list {
		colour := colours[i%len(colours)]
		if c := named[s.name]; c != "" {
			colour = c
		}
		legend = append(legend, entry{s.name, colour})
		var path strings.Builder
		for j, pt := range s.points {
			if bars {
				at := int(pt[0])
				fmt.Fprintf(&svg, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`,
					x(pt[0]), y(base[at]+pt[1]), (width-left)/seconds, y(0)-y(pt[1]), colour)
				base[at] += pt[1]
				continue
			}
			if j == 0 || pt[0]-s.points[j-1][0] > 1.5*step.Seconds() {
				fmt.Fprintf(&path, "M%.1f %.1fh1", x(pt[0]), y(pt[1]))
			}
			fmt.Fprintf(&path, "L%.1f %.1f", x(pt[0]), y(pt[1]))
		}
		fmt.Fprintf(&svg, `<path d="%s" fill="none" stroke="%s" stroke-width="1.6"/>`, path.String(), colour)
	}
	return frame(svg.String()), legend
}

func timeline(list []series, seconds float64) template.HTML {
	const names = 140.0
	x := func(t float64) float64 { return names + t/seconds*(width-names) }
	var svg strings.Builder
	axes(&svg, seconds, x)
	row := (height - bottom) / float64(len(list))
	for i, s := range list {
		fmt.Fprintf(&svg, `<text x="%.1f" y="%.1f" text-anchor="end">%s</text>`, names-6, float64(i)*row+row*0.65, template.HTMLEscapeString(s.name))
		for _, pt := range s.points {
			colour := named["green"]
			if pt[1] == 0 {
				colour = named["red"]
			}
			fmt.Fprintf(&svg, `<rect x="%.1f" y="%.1f" width="%.2f" height="%.1f" fill="%s"/>`, x(pt[0]), float64(i)*row+2, (width-names)/seconds+0.3, row-4, colour)
		}
	}
	return frame(svg.String())
}

func axes(svg *strings.Builder, seconds float64, x func(float64) float64) {
	for t := 0.0; t < seconds; t += 30 {
		fmt.Fprintf(svg, `<text x="%.1f" y="%.1f" text-anchor="middle">%d:%02d</text>`, x(t), height-3, int(t)/60, int(t)%60)
	}
}

func frame(inner string) template.HTML {
	return template.HTML(fmt.Sprintf(`<svg viewBox="0 0 %.0f %.0f" preserveAspectRatio="none">%s</svg>`, width, height, inner))
}

// amount writes a value with its unit, short.
func amount(v float64, unit string) string {
	if unit == "s" && v != 0 && v < 1 {
		for _, u := range []struct {
			size float64
			name string
		}{{1e-3, "ms"}, {1e-6, "µs"}} {
			if v >= u.size {
				return fmt.Sprintf("%.3g %s", v/u.size, u.name)
			}
		}
	}
	suffix := map[string]string{"s": " s", "ops": "/s"}[unit]
	return fmt.Sprintf("%.3g%s", v, suffix)
}
