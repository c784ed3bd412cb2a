{{- define "fairlead.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "fairlead.epp" -}}
{{- printf "%s-epp" (include "fairlead.fullname" .) -}}
{{- end }}

{{/* The service that gateways ask: with leader election one without a selector, which the leader itself points at */}}
{{- define "fairlead.picker" -}}
{{- include "fairlead.epp" . }}{{ if include "fairlead.leaderElection" . }}-leader{{ end -}}
{{- end }}

{{/* The one pool, or nothing */}}
{{- define "fairlead.pool" -}}
{{- if and (or .Values.inferencePool.create .Values.inferencePool.name) (not .Values.inferencePool.namespaces) -}}
{{- .Values.inferencePool.name | default (include "fairlead.fullname" .) -}}
{{- end -}}
{{- end }}

{{/* The API group of the pool */}}
{{- define "fairlead.group" -}}
{{- include "fairlead.config" . | fromYaml | dig "kubernetes" "group" "inference.networking.k8s.io" -}}
{{- end }}

{{- define "fairlead.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "fairlead.labels" -}}
{{- include "fairlead.allLabels" (list . (include "fairlead.selector" .) "inference-scheduler") -}}
{{- end }}

{{/* (root, selector, component): labels of an object; the chart's own win over commonLabels */}}
{{- define "fairlead.allLabels" -}}
{{- $root := index . 0 -}}
{{- $chart := printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" -}}
{{- $own := dict "app.kubernetes.io/version" $root.Chart.AppVersion "app.kubernetes.io/component" (index . 2) "app.kubernetes.io/managed-by" $root.Release.Service "helm.sh/chart" $chart -}}
{{- toYaml (merge (index . 1 | fromYaml) $own ($root.Values.commonLabels | default dict)) -}}
{{- end }}

{{/* (root, selector, values of the part): metadata of its pods, but for annotations */}}
{{- define "fairlead.podLabels" -}}
{{- $values := index . 2 -}}
{{- toYaml (merge (index . 1 | fromYaml) ($values.podLabels | default dict) ((index . 0).Values.commonLabels | default dict)) -}}
{{- end }}

{{/* (root, selector, values of the part): what pods of both parts have in common */}}
{{- define "fairlead.podSpec" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
{{- $spread := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" (dict "matchLabels" (index . 1 | fromYaml)) -}}
{{- $spec := dict "securityContext" $root.Values.inferenceExtension.podSecurityContext "imagePullSecrets" $root.Values.imagePullSecrets -}}
{{- range list "nodeSelector" "tolerations" "affinity" "priorityClassName" -}}{{- $_ := set $spec . (index $values .) -}}{{- end -}}
{{- $_ := set $spec "topologySpreadConstraints" ($values.topologySpreadConstraints | default (list $spread)) -}}
{{- range $key, $value := $spec -}}{{- if not $value -}}{{- $_ := unset $spec $key -}}{{- end -}}{{- end -}}
{{- toYaml $spec -}}
{{- end }}

{{- define "fairlead.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "fairlead.epp" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end }}

{{/* "true", or nothing */}}
{{- define "fairlead.leaderElection" -}}
{{- $asked := (.Values.inferenceExtension.leaderElection).enabled -}}
{{- $several := gt (int .Values.inferenceExtension.replicas) 1 -}}
{{- if kindIs "bool" $asked -}}
{{- if $asked -}}true{{- end -}}
{{- else if .Values.inferencePool.namespaces -}}
{{- /* Who leads keeps the slices of the pools' services, also where there is one replica. */ -}}
true
{{- else if and $several (not (include "fairlead.shared" .)) (not .Values.standalone.enabled) (not .Values.autoscaling.enabled) -}}
true
{{- end -}}
{{- end }}

{{/* What independent schedulers cost, measured: docs/benchmarks.md */}}
{{- define "fairlead.independentCost" -}}
with three of them 42 instead of 74 % of prompt tokens were found in caches, and p95 TTFT was 20 times as long
{{- end }}

{{/* "true" where several replicas answer and know nothing of each other, or nothing */}}
{{- define "fairlead.independent" -}}
{{- $several := or (gt (int .Values.inferenceExtension.replicas) 1) .Values.autoscaling.enabled -}}
{{- if and $several (not (include "fairlead.leaderElection" .)) (not (include "fairlead.shared" .)) -}}true{{- end -}}
{{- end }}

{{/* "true", or nothing */}}
{{- define "fairlead.tls" -}}
{{- if and (not .Values.standalone.enabled) (ne .Values.tls.mode "none") -}}true{{- end -}}
{{- end }}

{{- define "fairlead.tlsSecret" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{- required "tls.secretName: name the secret with tls.crt and tls.key" .Values.tls.secretName -}}
{{- else -}}
{{- printf "%s-tls" (include "fairlead.epp" .) -}}
{{- end -}}
{{- end }}

{{/* Names that gateways may know the picker by; both, so that a certificate stays when the number of replicas changes */}}
{{- define "fairlead.tlsHosts" -}}
{{- $hosts := list -}}
{{- range list (include "fairlead.epp" .) (printf "%s-leader" (include "fairlead.epp" .)) -}}
{{- $inside := printf "%s.%s" . $.Release.Namespace -}}
{{- $hosts = concat $hosts (list . $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside)) -}}
{{- end -}}
{{- toYaml $hosts -}}
{{- end }}

{{/* The port that engines send KV events to, or nothing */}}
{{- define "fairlead.zmqPort" -}}
{{- with .Values.inferenceExtension.kvcacheIndexer -}}
{{- if and .enabled .zmqSubscriberURL -}}{{- regexFind "[0-9]+$" .zmqSubscriberURL -}}{{- end -}}
{{- end -}}
{{- end }}

{{/* The same where it is a port of the scheduler */}}
{{- define "fairlead.kvPort" -}}
{{- if not (include "fairlead.ownIndexer" .) -}}{{- include "fairlead.zmqPort" . -}}{{- end -}}
{{- end }}

{{/* The ports of all data-parallel ranks by name, where that of the first is the second item of the list, or nothing */}}
{{- define "fairlead.rankPorts" -}}
{{- $ports := dict -}}
{{- with index . 1 -}}
{{- range $rank := until (dig "kvEvents" "ranks" 1 (include "fairlead.sections" (index $ 0).Values.config | fromYaml) | int) -}}
{{- $_ := set $ports (ternary (printf "kv-events-%d" $rank) "kv-events" (gt $rank 0)) (add (index $ 1) $rank) -}}
{{- end -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end }}

{{/* The port that gateways send their access log to, where it is not that of ext_proc, or nothing */}}
{{- define "fairlead.alsPort" -}}
{{- $config := include "fairlead.config" . | fromYaml -}}
{{- $port := dig "als" "port" 0 $config | int -}}
{{- $none := or .Values.standalone.enabled .Values.inferencePool.namespaces -}}
{{- if and $port (dig "als" "enabled" true $config) (not $none) (ne $port (int $config.extProc.port)) -}}{{- $port -}}{{- end -}}
{{- end }}

{{- define "fairlead.image" -}}
{{- with .Values.image -}}
image: "{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}"
imagePullPolicy: {{ .pullPolicy }}
{{- end -}}
{{- end }}

{{/* (a configuration, or nothing): its sections, without those that are empty, and with `gateway: none` in its long form */}}
{{- define "fairlead.sections" -}}
{{- $sections := dict -}}
{{- range $name, $section := . -}}
{{- if and (eq $name "gateway") (kindIs "string" $section) -}}{{- $section = dict "mode" $section -}}{{- end -}}
{{- if not (kindIs "invalid" $section) -}}{{- $_ := set $sections $name $section -}}{{- end -}}
{{- end -}}
{{- toYaml $sections -}}
{{- end }}

{{/* The configuration that the chart writes, with .Values.config over it */}}
{{- define "fairlead.config" -}}
{{- $service := printf "%s.%s" (include "fairlead.epp" .) .Release.Namespace -}}
{{- $hosts := list (include "fairlead.epp" .) $service (printf "%s.svc" $service) (printf "%s.svc.cluster.local" $service) -}}
{{- $config := dict "log" (dict "format" "json") "admin" (dict "host" "::" "port" 9090 "debug" false "hosts" $hosts) -}}
{{- $kubernetes := dict "namespace" .Release.Namespace -}}
{{- if .Values.inferencePool.namespaces -}}
{{- $_ := set $kubernetes "namespaces" .Values.inferencePool.namespaces -}}
{{- else if include "fairlead.pool" . -}}
{{- $_ := set $kubernetes "pool" (include "fairlead.pool" .) -}}
{{- else -}}
{{- $ports := list -}}
{{- range .Values.inferencePool.targetPorts -}}{{- $ports = append $ports (int .number) -}}{{- end -}}
{{- $_ := set $kubernetes "selector" .Values.inferencePool.modelServers.matchLabels -}}
{{- $_ := set $kubernetes "targetPorts" $ports -}}
{{- end -}}
{{- if include "fairlead.leaderElection" . -}}
{{- $election := dict "enabled" true "leaseName" (include "fairlead.epp" .) -}}
{{- if not .Values.inferencePool.namespaces -}}{{- $_ := set $election "service" (include "fairlead.picker" .) -}}{{- end -}}
{{- $_ := set $kubernetes "leaderElection" $election -}}
{{- end -}}
{{- $_ := set $config "kubernetes" $kubernetes -}}
{{- if .Values.standalone.enabled -}}
{{- $gateway := dict "mode" "embedded" "host" "::" "port" (int .Values.standalone.port) -}}
{{- if .Values.standalone.keysSecret -}}{{- $_ := set $gateway "keys" (dict "file" "/etc/fairlead-keys/keys") -}}{{- end -}}
{{- $_ := set $config "gateway" $gateway -}}
{{- else -}}
{{- $_ := set $config "gateway" (dict "mode" "none") -}}
{{- $extProc := dict "host" "::" "port" 9002 "healthPort" 9003 -}}
{{- if include "fairlead.tls" . -}}{{- $_ := set $extProc "tls" (dict "certDir" "/etc/fairlead-tls") -}}{{- end -}}
{{- $_ := set $config "extProc" $extProc -}}
{{- end -}}
{{- if not (dig "journal" "path" "" (include "fairlead.sections" .Values.config | fromYaml)) -}}
{{- /* On the pod's emptyDir, so that a container which is restarted goes on with it. Beside the journal where there is one. */ -}}
{{- $_ := set $config "state" (dict "file" "/tmp/fairlead/learned.state") -}}
{{- end -}}
{{- with include "fairlead.replicas" . | fromYaml -}}{{- $_ := set $config "replicas" . -}}{{- end -}}
{{- with .Values.tracing -}}
{{- /* `--set` makes text of fractions. */ -}}
{{- if .endpoint -}}{{- $_ := set $config "tracing" (dict "endpoint" .endpoint "sample" (float64 .sample)) -}}{{- end -}}
{{- end -}}
{{- with .Values.inferenceExtension -}}
{{- if .kvcacheIndexer.enabled -}}
{{- $kv := dict "enabled" true -}}
{{- if include "fairlead.ownIndexer" $ -}}
{{- $_ := set $kv "indexer" (dict "url" (include "fairlead.indexerURL" $)) -}}
{{- else -}}
{{- with .kvcacheIndexer.zmqSubscriberURL -}}{{- $_ := set $kv "bind" . -}}{{- end -}}
{{- end -}}
{{- $_ := set $config "kvEvents" $kv -}}
{{- end -}}
{{- $extension := dict -}}
{{- with .pluginsCustomConfig -}}{{- $_ := set $extension "pluginsCustomConfig" . -}}{{- end -}}
{{- with .pluginsConfigFile -}}{{- $_ := set $extension "pluginsConfigFile" . -}}{{- end -}}
{{- with $extension -}}{{- $_ := set $config "inferenceExtension" . -}}{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (include "fairlead.schedulerConfig" . | fromYaml)) -}}
{{- end }}

{{/* (configuration): the limit of /tmp. A pod with more there is evicted, so a journal there counts with its own limit. */}}
{{- define "fairlead.tmpSize" -}}
{{- $mib := 256 -}}
{{- if hasPrefix "/tmp/" (printf "%s/" (dig "journal" "path" "" .)) -}}
{{- $most := dig "journal" "maxBytes" "1Gi" . -}}
{{- if kindIs "string" $most -}}
{{- $factors := dict "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "ki" 1024 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $most = mulf (regexFind "[0-9.]+" $most | float64) (dig (regexFind "[kKMGT]i?" $most) 1 $factors) -}}
{{- end -}}
{{- $mib = add $mib (ceil (divf $most 1048576)) -}}
{{- end -}}
{{- $mib }}Mi
{{- end }}

{{/* With the content in its name a pod that runs keeps the file that it began with, whatever is installed next */}}
{{- define "fairlead.configMap" -}}
{{- include "fairlead.epp" . }}{{ if .Values.restartOnConfigChange }}-{{ include "fairlead.config" . | sha256sum | trunc 10 }}{{ end -}}
{{- end }}

{{/* (root, Deployment, name, labels, text): the ConfigMap, and those that the running Deployment and its ReplicaSets with pods name: pods may be made again */}}
{{- define "fairlead.configMaps" -}}
{{- $root := index . 0 -}}
{{- $namespace := $root.Release.Namespace -}}
{{- $texts := dict (index . 2) (index . 4) -}}
{{- $running := lookup "apps/v1" "Deployment" $namespace (index . 1) -}}
{{- $templates := list (dig "spec" "template" dict ($running | default dict)) -}}
{{- /* The first installation needs no right to list them. */ -}}
{{- $sets := list -}}
{{- if $running -}}{{- $sets = (lookup "apps/v1" "ReplicaSet" $namespace "").items -}}{{- end -}}
{{- range $sets -}}
{{- if and (dig "status" "replicas" 0 .) (eq (index $ 1) (dig "name" "" (first (.metadata.ownerReferences | default list) | default dict))) -}}
{{- $templates = append $templates .spec.template -}}
{{- end -}}
{{- end -}}
{{- range $templates -}}
{{- range dig "spec" "volumes" list . -}}
{{- if and (eq .name "config") (ne (dig "configMap" "name" "" .) (index $ 2)) -}}
{{- $kept := lookup "v1" "ConfigMap" $namespace .configMap.name -}}
{{- with dig "data" "fairlead.yaml" "" ($kept | default dict) -}}{{- $_ := set $texts $kept.metadata.name . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $text := $texts }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  namespace: {{ $namespace | quote }}
  labels: {{- index $ 3 | nindent 4 }}
data:
  fairlead.yaml: |
    {{- $text | nindent 4 }}
{{- end }}
{{- end }}

{{/* A selector of the model servers' pods; of all, where only the pool knows them */}}
{{- define "fairlead.coreServers" -}}
{{- with .Values.inferencePool.modelServers.matchLabels -}}
matchLabels: {{- toYaml . | nindent 2 }}
{{- else -}}
{}
{{- end -}}
{{- end }}

{{/* An egress rule to the API server, which has no labels to select it by */}}
{{- define "fairlead.toApiServer" -}}
{{- $rule := dict "ports" list -}}
{{- range .apiServerPorts -}}{{- $_ := set $rule "ports" (append $rule.ports (dict "port" . "protocol" "TCP")) -}}{{- end -}}
{{- range .apiServerCidrs -}}{{- $_ := set $rule "to" (append ($rule.to | default list) (dict "ipBlock" (dict "cidr" .))) -}}{{- end -}}
{{- toJson $rule -}}
{{- end }}

{{/* The port of an http URL */}}
{{- define "fairlead.portOf" -}}
{{- $url := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- $port | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end }}

{{/* Ports of the pod that are the same: the API server would refuse them, or the second listener fail */}}
{{- define "fairlead.checkPorts" -}}
{{- $config := include "fairlead.config" . | fromYaml -}}
{{- $named := dict "config.admin.port" $config.admin.port "config.admin.metricsPort" $config.admin.metricsPort "config.extProc.port" (dig "extProc" "port" 9002 $config) -}}
{{- $named = merge $named (dict "config.extProc.healthPort" (dig "extProc" "healthPort" 0 $config) "config.autoscaling.port" (dig "autoscaling" "port" 0 $config)) -}}
{{- $_ := set $named "inferenceExtension.kvcacheIndexer.zmqSubscriberURL" (include "fairlead.kvPort" .) -}}
{{- $_ := set $named "config.als.port" (include "fairlead.alsPort" .) -}}
{{- if .Values.standalone.enabled -}}{{- $_ := set $named "standalone.port" $config.gateway.port -}}{{- end -}}
{{- $taken := dict -}}
{{- range $value, $port := $named -}}
{{- $port = int $port | toString -}}
{{- if and (ne $port "0") (hasKey $taken $port) -}}{{- fail (printf "%s: port %s is that of %s" $value $port (get $taken $port)) -}}{{- end -}}
{{- $_ := set $taken $port $value -}}
{{- end -}}
{{- end }}

{{/* (root, config.kubernetes): what differs there from the objects that the chart makes */}}
{{- define "fairlead.checkKubernetes" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 -}}
{{- $made := or $root.Values.rbac.create $root.Values.inferencePool.create -}}
{{- if and $made $own.namespace (ne $own.namespace $root.Release.Namespace) -}}
{{- fail "config.kubernetes.namespace: the chart's role and pool are of the release's namespace; install the release there, or set inferencePool.namespaces" -}}
{{- end -}}
{{- if and $own.pool (ne $own.pool (include "fairlead.pool" $root)) -}}
{{- fail "config.kubernetes.pool: objects of the chart name the pool too; set inferencePool.name" -}}
{{- end -}}
{{- if and $root.Values.inferenceObjectives (eq false (dig "models" true $own)) -}}
{{- fail "config.kubernetes.models: without model definitions, inferenceObjectives have no effect; leave one of them out" -}}
{{- end -}}
{{- $service := dig "leaderElection" "service" "" $own -}}
{{- if and $service (ne $service (include "fairlead.picker" $root)) -}}
{{- fail (printf "config.kubernetes.leaderElection.service: gateways ask the chart's Service %s; leave it out" (include "fairlead.picker" $root)) -}}
{{- end -}}
{{- end }}

{{/* Values under config that contradict others, with which the scheduler or the indexer would not start */}}
{{- define "fairlead.checkConfig" -}}
{{- $own := include "fairlead.sections" .Values.config | fromYaml -}}
{{- if $own.endpoints -}}
{{- fail "config.endpoints: endpoints come from Kubernetes here; leave it out" -}}
{{- end -}}
{{- if and .Values.standalone.enabled (eq (dig "gateway" "mode" "" $own) "none") -}}
{{- fail "config.gateway.mode: standalone.enabled starts a gateway; leave one of them out" -}}
{{- end -}}
{{- if and (not .Values.standalone.enabled) (eq (dig "gateway" "mode" "" $own) "embedded") -}}
{{- fail "config.gateway.mode: set standalone.enabled, which also opens the gateway's port" -}}
{{- end -}}
{{- include "fairlead.checkKubernetes" (list . (dig "kubernetes" dict $own)) -}}
{{- $configs := list (include "fairlead.config" . | fromYaml) -}}
{{- if and (include "fairlead.tls" .) (not (dig "extProc" "tls" "" (first $configs))) -}}
{{- fail "config.extProc.tls: the Services say that the picker speaks TLS; set tls.mode=none instead" -}}
{{- end -}}
{{- if include "fairlead.ownIndexer" . -}}{{- $configs = append $configs (include "fairlead.indexerConfig" . | fromYaml) -}}{{- end -}}
{{- range $configs -}}
{{- if and (dig "kvEvents" "bind" "" .) (dig "kvEvents" "port" 0 .) -}}
{{- fail "config.kvEvents.port: engines dial in at inferenceExtension.kvcacheIndexer.zmqSubscriberURL or kvEvents.bind, or are dialled at this port; leave one of them out" -}}
{{- end -}}
{{- end -}}
{{- $custom := .Values.inferenceExtension.pluginsCustomConfig | default dict -}}
{{- $file := .Values.inferenceExtension.pluginsConfigFile -}}
{{- $texts := ne (len $custom) 0 -}}
{{- range $custom -}}{{- if not (kindIs "string" .) -}}{{- $texts = false -}}{{- end -}}{{- end -}}
{{- if and $texts (or $file (gt (len $custom) 1)) (not (hasKey $custom $file)) -}}
{{- fail (printf "inferenceExtension.pluginsConfigFile: %q is none of the files under pluginsCustomConfig: %s" $file (keys $custom | sortAlpha | join ", ")) -}}
{{- end -}}
{{- range list "policy" "filters" "scorers" "selection" "builtinFilters" -}}
{{- if and (hasKey $own .) (or $texts (hasKey $custom .)) -}}
{{- fail (printf "config.%s: inferenceExtension.pluginsCustomConfig says how to choose; leave one of them out" .) -}}
{{- end -}}
{{- end -}}
{{- $all := merge dict $own $custom -}}
{{- if and (kindIs "string" $all.policy) (ne $all.policy "default") (or (hasKey $all "filters") (hasKey $all "scorers") $all.selection) -}}
{{- fail (printf "config.policy: %q brings its own filters, scorers and selection; leave one or the other out" $all.policy) -}}
{{- end -}}
{{- end -}}

{{/* What cannot work is refused here */}}
{{- define "fairlead.check" -}}
{{- if contains "." (include "fairlead.fullname" .) -}}
{{- fail "fullnameOverride: names of Services have no dots, as that of the release has; give one without" -}}
{{- end -}}
{{- with lookup "apps/v1" "Deployment" .Release.Namespace (include "fairlead.epp" .) -}}
{{- $name := dig "spec" "selector" "matchLabels" "app.kubernetes.io/name" "" . -}}
{{- if ne $name (get (include "fairlead.selector" $ | fromYaml) "app.kubernetes.io/name") -}}
{{- if ne (dig "metadata" "annotations" "meta.helm.sh/release-name" "" .) $.Release.Name -}}
{{- fail (printf "fullnameOverride: the Deployment %s, which is not of this release, is in the way; give another name, or delete it" .metadata.name) -}}
{{- end -}}
{{- fail (printf "nameOverride: the running Deployment selects its pods by the name %q, which cannot change; keep it, or set another fullnameOverride too, which replaces the objects" $name) -}}
{{- end -}}
{{- end -}}
{{- $pool := .Values.inferencePool -}}
{{- if $pool.namespaces -}}
{{- $others := dict "standalone.enabled" .Values.standalone.enabled "httpRoute.enabled" .Values.httpRoute.enabled "inferenceObjectives" .Values.inferenceObjectives "inferencePool.name" $pool.name "inferencePool.modelServers.matchLabels" $pool.modelServers.matchLabels "inferenceExtension.kvcacheIndexer.enabled" .Values.inferenceExtension.kvcacheIndexer.enabled "inferenceExtension.valkey" (include "fairlead.shared" .) "provider.name" (has .Values.provider.name (list "istio" "gke")) -}}
{{- $own := include "fairlead.sections" .Values.config | fromYaml -}}
{{- $others = merge $others (dict "config.autoscaling.port" (dig "autoscaling" "port" 0 $own) "config.extProc.transport" (has (dig "extProc" "transport" "" $own) (list "grpc-aio")) "config.kvEvents.bind" (dig "kvEvents" "bind" "" $own) "config.replicas.via" (dig "replicas" "via" "" $own)) -}}
{{- range $value, $set := $others -}}
{{- if $set -}}{{- fail (printf "inferencePool.namespaces: %s is for one pool; leave one of them out" $value) -}}{{- end -}}
{{- end -}}
{{- if not (include "fairlead.leaderElection" .) -}}
{{- fail "inferenceExtension.leaderElection.enabled: with inferencePool.namespaces it stays on, for the leader points the pools' Services at itself" -}}
{{- end -}}
{{- else if and (or $pool.create (not $pool.name)) (not $pool.modelServers.matchLabels) -}}
{{- fail "inferencePool.modelServers.matchLabels: give the labels of the model servers' pods, e.g. --set inferencePool.modelServers.matchLabels.app=vllm" -}}
{{- end -}}
{{- if and $pool.create (include "fairlead.pool" .) (ne (include "fairlead.group" .) "inference.networking.k8s.io") -}}
{{- fail "config.kubernetes.group: the chart makes no pool of this group, for which the scheduler would wait; set inferencePool.create=false and name yours" -}}
{{- end -}}
{{- if and (not $pool.create) (not $pool.name) (not $pool.namespaces) (not .Values.standalone.enabled) -}}
{{- fail "inferencePool.name: a gateway needs a pool; name it, or set inferencePool.create" -}}
{{- end -}}
{{- if and .Values.inferenceObjectives (not (include "fairlead.pool" .)) -}}
{{- fail "inferenceObjectives: they belong to a pool; name it with inferencePool.name, or set inferencePool.create" -}}
{{- end -}}
{{- if and .Values.standalone.enabled (ne .Values.provider.name "none") -}}
{{- fail "provider.name: standalone is a gateway of its own; choose one of them" -}}
{{- end -}}
{{- if and .Values.standalone.keysSecret (not .Values.standalone.enabled) -}}
{{- fail "standalone.keysSecret: only a gateway of our own asks for keys; set standalone.enabled, or let your gateway know its clients" -}}
{{- end -}}
{{- include "fairlead.checkValkey" . -}}
{{- $asked := dig "kubernetes" "leaderElection" "enabled" nil (include "fairlead.sections" .Values.config | fromYaml) -}}
{{- if and (kindIs "bool" $asked) (ne $asked (eq (include "fairlead.leaderElection" .) "true")) -}}
{{- fail "config.kubernetes.leaderElection.enabled: it would contradict the chart's Services; set inferenceExtension.leaderElection.enabled" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas: more than maxReplicas" -}}
{{- end -}}
{{- if include "fairlead.leaderElection" . -}}
{{- if lt (int .Values.inferenceExtension.terminationGracePeriodSeconds) 45 -}}
{{- fail "inferenceExtension.terminationGracePeriodSeconds: with leader election at least 45, for a leader that ends hands over first (11 s) and then finishes its requests (30 s)" -}}
{{- end -}}
{{- if .Values.autoscaling.enabled -}}
{{- fail "autoscaling.enabled: with leader election further replicas take no requests; set inferenceExtension.leaderElection.enabled=false" -}}
{{- end -}}
{{- if .Values.standalone.enabled -}}
{{- fail "inferenceExtension.leaderElection.enabled: a standalone gateway that stands by serves nothing; leave it out" -}}
{{- end -}}
{{- end -}}
{{- if and (include "fairlead.independent" .) (not (kindIs "bool" (.Values.inferenceExtension.leaderElection).enabled)) -}}
{{- $value := ternary "autoscaling.enabled" "inferenceExtension.replicas" .Values.autoscaling.enabled -}}
{{- $instead := "inferenceExtension.valkey.enabled=true, with which they decide as one" -}}
{{- fail (printf "%s: each of these replicas would schedule for itself, without knowing the others' requests: %s. Better: %s. To have it all the same: inferenceExtension.leaderElection.enabled=false" $value (include "fairlead.independentCost" .) $instead) -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "cert-manager") (not .Values.tls.issuerRef.name) -}}
{{- fail "tls.issuerRef.name: name the issuer of the certificate" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the gateway, e.g. [{name: inference-gateway}]" -}}
{{- end -}}
{{- include "fairlead.checkConfig" . -}}
{{- include "fairlead.checkPorts" . -}}
{{- include "fairlead.checkAdmin" . -}}
{{- include "fairlead.checkIndexer" . -}}
{{- if and .Values.inferenceExtension.kvcacheIndexer.zmqSubscriberURL (not (include "fairlead.zmqPort" .)) .Values.inferenceExtension.kvcacheIndexer.enabled -}}
{{- fail "inferenceExtension.kvcacheIndexer.zmqSubscriberURL: a port is missing, e.g. tcp://*:5555" -}}
{{- end -}}
{{- end }}
