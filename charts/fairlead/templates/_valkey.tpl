{{/* "true" where replicas of the scheduler decide as one (active-active), or nothing */}}
{{- define "fairlead.shared" -}}
{{- $valkey := .Values.inferenceExtension.valkey -}}
{{- if or $valkey.enabled $valkey.address (dig "replicas" "via" "" (include "fairlead.sections" .Values.config | fromYaml)) -}}true{{- end -}}
{{- end }}

{{- define "fairlead.valkey" -}}
{{- /* A StatefulSet's name is at most 52 long: its pods have a label with it and a hash. */ -}}
{{- printf "%s-valkey" (include "fairlead.fullname" . | trunc 45 | trimSuffix "-") -}}
{{- end }}

{{- define "fairlead.valkeySelector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name | trunc 56 | trimSuffix "-" }}-valkey
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "fairlead.valkeyLabels" -}}
{{- include "fairlead.allLabels" (list . (include "fairlead.valkeySelector" .) "replicas") -}}
{{- end }}

{{/* The Secret with the password, or nothing */}}
{{- define "fairlead.valkeySecret" -}}
{{- with .Values.inferenceExtension.valkey -}}
{{- .passwordSecret | default (ternary (include "fairlead.valkey" $) "" (eq true .enabled)) -}}
{{- end -}}
{{- end }}

{{/* `replicas` of the scheduler's configuration */}}
{{- define "fairlead.replicas" -}}
{{- $valkey := .Values.inferenceExtension.valkey -}}
{{- $via := $valkey.address -}}
{{- if $valkey.enabled -}}{{- $via = printf "valkey://fairlead@%s:6379/0" (include "fairlead.valkey" .) -}}{{- end -}}
{{- $replicas := dict -}}
{{- if $via -}}
{{- $_ := set $replicas "via" $via -}}
{{- with include "fairlead.valkeySecret" . -}}{{- $_ := set $replicas "passwordFile" "/etc/fairlead-valkey/password" -}}{{- end -}}
{{- if $valkey.caSecret -}}{{- $_ := set $replicas "caFile" "/etc/fairlead-valkey-ca/ca.crt" -}}{{- end -}}
{{- if $valkey.certSecret -}}{{- $_ := set $replicas "certDir" "/etc/fairlead-valkey-cert" -}}{{- end -}}
{{- end -}}
{{- toYaml $replicas -}}
{{- end }}

{{/* What cannot work is refused here */}}
{{- define "fairlead.checkValkey" -}}
{{- $valkey := .Values.inferenceExtension.valkey -}}
{{- if and $valkey.enabled $valkey.address -}}
{{- fail "inferenceExtension.valkey: enabled makes a Valkey, address names yours; choose one of them" -}}
{{- end -}}
{{- if and (or $valkey.enabled $valkey.address) (dig "replicas" "via" "" (include "fairlead.sections" .Values.config | fromYaml)) -}}
{{- fail "config.replicas.via: inferenceExtension.valkey says it already; leave out one of them" -}}
{{- end -}}
{{- if and (or $valkey.caSecret $valkey.certSecret) (not (hasPrefix "valkeys:" $valkey.address)) (not (hasPrefix "rediss:" $valkey.address)) -}}
{{- fail "inferenceExtension.valkey: caSecret and certSecret are for TLS; give an address that begins with valkeys:// or rediss://" -}}
{{- end -}}
{{- if and $valkey.passwordSecret (not $valkey.enabled) (not $valkey.address) -}}
{{- fail "inferenceExtension.valkey.passwordSecret: of which server? Set valkey.enabled, or valkey.address" -}}
{{- end -}}
{{- if and (include "fairlead.shared" .) (include "fairlead.leaderElection" .) -}}
{{- fail "inferenceExtension.leaderElection.enabled: with a Valkey all replicas answer and decide as one, so nobody is to lead; leave it out" -}}
{{- end -}}
{{- end }}
