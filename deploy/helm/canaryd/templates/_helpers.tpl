{{- define "canaryd.image" -}}
{{- $image := .Values.image -}}
{{- $name := required "image.repository is empty: there is no public image, so name your own" $image.repository -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ required "image.tag and image.digest are empty: name one of them" $image.tag }}
{{- end -}}
{{- end -}}

{{- define "canaryd.labels" -}}
app.kubernetes.io/name: canaryd
{{- end -}}
