{{- define "canaryd.image" -}}
{{- $image := .Values.image -}}
{{- $name := required "image.repository is empty: there is no public image, so name your own" $image.repository -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ required "image.tag and image.digest are empty: name one of them" $image.tag }}
{{- end -}}
{{- end -}}

{{- /* canaryd, canaryd-observe, or for a release of another name NAME-canaryd. */ -}}
{{- define "canaryd.name" -}}
{{- $name := ternary .Release.Name (printf "%s-canaryd" .Release.Name) (contains "canaryd" .Release.Name) -}}
{{- trunc 52 $name | trimSuffix "-" -}}
{{- end -}}

{{- /* The pods of this release, and of no other one. */ -}}
{{- define "canaryd.selector" -}}
app.kubernetes.io/name: canaryd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* metadata of an object; suffix is appended to its name, labels are its own. */ -}}
{{- define "canaryd.metadata" -}}
name: {{ include "canaryd.name" .of }}{{ .suffix }}
namespace: {{ .of.Release.Namespace }}
labels:
  {{- include "canaryd.labels" (list .of.Values.labels .labels (include "canaryd.selector" .of | fromYaml)) | nindent 2 }}
{{- end -}}

{{- /* Several sets of labels as one; the last one wins, because a selector depends on it. */ -}}
{{- define "canaryd.labels" -}}
{{- $all := dict -}}
{{- range . }}{{ $all = mergeOverwrite $all (deepCopy (default dict .)) }}{{ end -}}
{{- toYaml $all -}}
{{- end -}}

{{- /* Whether Prometheus Operator asks canaryd at the node's address. */ -}}
{{- define "canaryd.scraped" -}}
{{- if or .Values.podMonitor.enabled .Values.serviceMonitor.enabled }}yes{{ end -}}
{{- end -}}

{{- /* The endpoint of both monitors. */ -}}
{{- define "canaryd.endpoint" -}}
- port: metrics
  path: /metrics
  interval: {{ .interval }}
  relabelings:
    # Alerts name the instance: the node says more than its address.
    - sourceLabels:
        - __meta_kubernetes_pod_node_name
      targetLabel: instance
    # For inhibitions: the alerts of kube-prometheus about a node have this label.
    - sourceLabels:
        - __meta_kubernetes_pod_node_name
      targetLabel: node
{{- end -}}
