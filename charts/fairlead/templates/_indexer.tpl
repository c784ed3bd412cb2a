{{/* "true" where the index of KV events is a deployment of its own, or nothing */}}
{{- define "fairlead.ownIndexer" -}}
{{- $values := .Values.inferenceExtension.kvcacheIndexer -}}
{{- $asked := include "fairlead.askedIndexer" . -}}
{{- if and $values.enabled (or (eq $values.mode "service") (and (not $values.mode) $asked (has $values.serviceName (list "" $asked)))) -}}true{{- end -}}
{{- end }}

{{/* The first cacheIndexerURL that a scorer names, or nothing */}}
{{- define "fairlead.cacheIndexerURL" -}}
{{- $urls := list -}}
{{- range concat ((.Values.inferenceExtension.pluginsCustomConfig).scorers | default list) ((.Values.config).scorers | default list) -}}
{{- range list . .parameters .params .config -}}
{{- with (. | default dict).cacheIndexerURL -}}{{- $urls = append $urls . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- first $urls -}}
{{- end }}

{{/* The service that it names, where that is one of this namespace, or nothing */}}
{{- define "fairlead.askedIndexer" -}}
{{- with include "fairlead.cacheIndexerURL" . -}}
{{- $labels := regexReplaceAll ":[0-9]+$" (urlParse .).host "" | splitList "." -}}
{{- if and (ne (first $labels) "localhost") (has (rest $labels | first) (list nil $.Release.Namespace)) -}}{{- first $labels -}}{{- end -}}
{{- end -}}
{{- end }}

{{- define "fairlead.indexer" -}}
{{- printf "%s-indexer" (include "fairlead.fullname" .) -}}
{{- end }}

{{- define "fairlead.indexerService" -}}
{{- .Values.inferenceExtension.kvcacheIndexer.serviceName | default (include "fairlead.askedIndexer" .) | default (include "fairlead.indexer" .) -}}
{{- end }}

{{- define "fairlead.indexerURL" -}}
{{- $service := include "fairlead.indexerService" . -}}
{{- if eq $service (include "fairlead.askedIndexer" .) -}}{{- include "fairlead.cacheIndexerURL" . -}}{{- else -}}{{- printf "http://%s:9090" $service -}}{{- end -}}
{{- end }}

{{/* Another name than the scheduler's: its services and policies select by name and instance */}}
{{- define "fairlead.indexerSelector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name | trunc 55 | trimSuffix "-" }}-indexer
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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
{{- $config := include "fairlead.sections" .Values.config | fromYaml -}}
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
{{- $_ := set $events "bind" $values.zmqSubscriberURL -}}
{{- else -}}
{{- $_ := set $events "snapshot" "/var/lib/fairlead/index.kv" -}}
{{- $_ := set $events "indexer" (dict "warmFrom" (include "fairlead.indexerURL" .)) -}}
{{- end -}}
{{- $events = mergeOverwrite $events (omit (deepCopy ((.Values.config).kvEvents | default dict)) "indexer") -}}
{{- $admin := dict "host" "::" "port" 9090 -}}
{{- $config := dict "log" $scheduler.log "admin" $admin "kubernetes" $kubernetes "kvEvents" $events -}}
{{- toYaml (mergeOverwrite $config (include "fairlead.sections" $values.config | fromYaml)) -}}
{{- end }}

{{/* What cannot work is refused here */}}
{{- define "fairlead.checkIndexer" -}}
{{- if include "fairlead.ownIndexer" . -}}
{{- $values := .Values.inferenceExtension.kvcacheIndexer -}}
{{- $events := (.Values.config).kvEvents | default dict -}}
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
