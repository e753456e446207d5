{{- define "canaryd.image" -}}
{{- $image := .Values.image -}}
{{- $name := required "image.repository is empty: there is no public image, so name your own" $image.repository -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ required "image.tag and image.digest are empty: name one of them" $image.tag }}
{{- end -}}
{{- end -}}

{{- /* canaryd, canaryd-observe, or for a release of another name NAME-canaryd. It always says canaryd,
because Prometheus' job is called so and alerts find it by that. Releases have 53 letters at most. */ -}}
{{- define "canaryd.name" -}}
{{- if contains "canaryd" .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ trunc 44 .Release.Name | trimSuffix "-" }}-canaryd
{{- end -}}
{{- end -}}

{{- /* The pods of this release, and of no other one. A DaemonSet's selector cannot be changed, so that
of the release canaryd is the one of all earlier builds. */ -}}
{{- define "canaryd.selector" -}}
app.kubernetes.io/name: {{ include "canaryd.name" . }}
{{- end -}}

{{- /* The last labels of objects and pods; part-of is the same for all releases. */ -}}
{{- define "canaryd.own" -}}
{{ include "canaryd.selector" . }}
app.kubernetes.io/part-of: canaryd
{{- end -}}

{{- /* metadata of an object; suffix is appended to its name, labels are its own. */ -}}
{{- define "canaryd.metadata" -}}
name: {{ include "canaryd.name" .of }}{{ .suffix }}
namespace: {{ .of.Release.Namespace }}
labels:
  {{- include "canaryd.labels" (list .of.Values.labels .labels (include "canaryd.own" .of | fromYaml)) | nindent 2 }}
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
