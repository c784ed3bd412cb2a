{{/* What cannot work is refused here */}}
{{- define "fairlead.checkAdmin" -}}
{{- $admin := (include "fairlead.config" . | fromYaml).admin -}}
{{- $monitoring := .Values.monitoring -}}
{{- $host := ternary ($admin.metricsHost | default $admin.host) $admin.host (gt (int $admin.metricsPort) 0) -}}
{{- if and (has $host (list "127.0.0.1" "::1" "localhost")) (or .Values.standalone.enabled $monitoring.enabled) -}}
{{- fail "config.admin.host: no probe or scraper reaches it in the pod; open a second port with config.admin.metricsHost and metricsPort" -}}
{{- end -}}
{{- if and $monitoring.enabled $admin.tokenFile (not (pick ($monitoring.endpoint | default dict) "authorization" "basicAuth" "bearerTokenSecret" "bearerTokenFile")) -}}
{{- fail "monitoring.endpoint.authorization: config.admin.tokenFile asks scrapers for a token; say where they find it" -}}
{{- end -}}
{{- end }}

{{/* "true" where everyone may read the debug pages, or nothing */}}
{{- define "fairlead.openDebug" -}}
{{- $admin := (include "fairlead.config" . | fromYaml).admin -}}
{{- /* The policy opens one port: with metricsPort not that of the debug pages. */ -}}
{{- $limited := and .Values.networkPolicy.enabled (or .Values.networkPolicy.metricsFrom $admin.metricsPort) -}}
{{- if and $admin.debug (not $admin.tokenFile) (not $limited) (not (has $admin.host (list "127.0.0.1" "::1" "localhost"))) -}}true{{- end -}}
{{- end }}

{{/* Groups of files/alerts, without alerts that are left out; where alerts are off, what is recorded for the dashboard */}}
{{- define "fairlead.alerts" -}}
{{- $left := (.Values.monitoring.rules).disabled -}}
{{- $groups := list -}}
{{- $named := list -}}
{{- range $path, $_ := .Files.Glob "files/alerts/*.yaml" -}}
{{- $text := $.Files.Get $path -}}
{{- if eq $.Values.monitoring.provider "gmp" -}}
{{- /* There the job is the name of the PodMonitoring. */ -}}
{{- $text = $text | replace "job=\"inference-scheduler\"" (printf "job=\"%s\"" (include "fairlead.epp" $)) -}}
{{- end -}}
{{- range ($text | fromYaml).groups -}}
{{- $rules := list -}}
{{- range .rules -}}
{{- with .alert -}}{{- $named = append $named . -}}{{- end -}}
{{- if or .record (and ($.Values.monitoring.rules).enabled (not (has .alert $left))) -}}{{- $rules = append $rules . -}}{{- end -}}
{{- end -}}
{{- if $rules -}}{{- $groups = append $groups (set (deepCopy .) "rules" $rules) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range $left -}}
{{- if not (has . $named) -}}
{{- fail (printf "monitoring.rules.disabled: there is no alert %s; there are %s" . (join ", " $named)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end }}
