{{/* "true" where the index of KV events is a deployment of its own, or nothing */}}
{{- define "fairlead.ownIndexer" -}}
{{- with .Values.inferenceExtension.kvcacheIndexer -}}
{{- if and .enabled (eq .mode "service") -}}true{{- end -}}
{{- end -}}
{{- end }}

{{- define "fairlead.indexer" -}}
{{- printf "%s-indexer" (include "fairlead.fullname" .) -}}
{{- end }}

{{- define "fairlead.indexerService" -}}
{{- .Values.inferenceExtension.kvcacheIndexer.serviceName | default (include "fairlead.indexer" .) -}}
{{- end }}

{{- define "fairlead.indexerURL" -}}
{{- printf "http://%s:9090" (include "fairlead.indexerService" .) -}}
{{- end }}

{{/* Another name than the scheduler's: its services and policies select by name and instance */}}
{{- define "fairlead.indexerSelector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}-indexer
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fairlead.indexerLabels" -}}
{{- include "fairlead.allLabels" (list . (include "fairlead.indexerSelector" .) "kv-cache-indexer") -}}
{{- end }}

{{- define "fairlead.indexerAccount" -}}
{{- if .Values.serviceAccount.create -}}{{- include "fairlead.indexer" . -}}{{- else -}}{{- include "fairlead.serviceAccount" . -}}{{- end -}}
{{- end }}

{{/* What config.kvEvents says of listening is the indexer's, where there is one, and the rest the scheduler's */}}
{{- define "fairlead.kvListening" -}}
{{- toYaml (list "port" "replayPort" "ranks" "bind" "curve" "snapshot" "snapshotInterval" "maxBlocks") -}}
{{- end }}

{{/* .Values.config for the scheduler */}}
{{- define "fairlead.schedulerConfig" -}}
{{- $config := deepCopy .Values.config -}}
{{- if and (include "fairlead.ownIndexer" .) $config.kvEvents -}}
{{- range include "fairlead.kvListening" . | fromYamlArray -}}{{- $_ := unset $config.kvEvents . -}}{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* The configuration of the indexer: the scheduler's way to the pool, and all of kvEvents but whom to ask */}}
{{- define "fairlead.indexerConfig" -}}
{{- $values := .Values.inferenceExtension.kvcacheIndexer -}}
{{- $scheduler := include "fairlead.config" . | fromYaml -}}
{{- $kubernetes := omit $scheduler.kubernetes "leaderElection" -}}
{{- $events := dict "enabled" true -}}
{{- if $values.zmqSubscriberURL -}}
{{- $_ := set $events "bind" ($values.zmqSubscriberURL | replace "*" "0.0.0.0") -}}
{{- else -}}
{{- $_ := set $events "snapshot" "/var/lib/fairlead/index.kv" -}}
{{- $_ := set $events "indexer" (dict "warmFrom" (include "fairlead.indexerURL" .)) -}}
{{- end -}}
{{- $events = mergeOverwrite $events (omit (deepCopy (.Values.config.kvEvents | default dict)) "indexer") -}}
{{- $admin := dict "host" "0.0.0.0" "port" 9090 -}}
{{- $config := dict "log" $scheduler.log "admin" $admin "kubernetes" $kubernetes "kvEvents" $events -}}
{{- toYaml (mergeOverwrite $config (deepCopy $values.config)) -}}
{{- end }}

{{/* What cannot work is refused here */}}
{{- define "fairlead.checkIndexer" -}}
{{- if include "fairlead.ownIndexer" . -}}
{{- $values := .Values.inferenceExtension.kvcacheIndexer -}}
{{- $events := .Values.config.kvEvents | default dict -}}
{{- with $events.indexer -}}
{{- if or .url .warmFrom -}}
{{- fail "config.kvEvents.indexer: inferenceExtension.kvcacheIndexer.mode=service makes an indexer and points the scheduler at it; leave out url and warmFrom, or set the mode to embedded" -}}
{{- end -}}
{{- end -}}
{{- if and $values.zmqSubscriberURL (gt (int $values.replicas) 1) -}}
{{- fail "inferenceExtension.kvcacheIndexer.replicas: engines that dial in reach one replica only; leave zmqSubscriberURL empty, so that every replica dials the engines" -}}
{{- end -}}
{{- end -}}
{{- end }}
