{{- define "ballast-operator.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "ballast-operator.serviceAccount" -}}
{{- default (include "ballast-operator.name" .) .Values.serviceAccount.name -}}
{{- end }}

{{- define "ballast-operator.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end }}

{{- define "ballast-operator.selector" -}}
app.kubernetes.io/name: ballast-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ballast-operator.labels" -}}
{{ include "ballast-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* What the operator may do in a namespace it looks after; one rule per thing it does. */}}
{{- define "ballast-operator.rules" -}}
- apiGroups: ["ballast.dev"]
  resources: ["storeclusters", "storebackups"]
  verbs: ["get", "list", "watch"]
# Finalizers are part of the object.
- apiGroups: ["ballast.dev"]
  resources: ["storeclusters", "storebackups"]
  verbs: ["patch"]
# Owner references with blockOwnerDeletion.
- apiGroups: ["ballast.dev"]
  resources: ["storeclusters/finalizers", "storebackups/finalizers"]
  verbs: ["update"]
- apiGroups: ["ballast.dev"]
  resources: ["storeclusters/status", "storebackups/status"]
  verbs: ["patch"]
# Scheduled backups and their retention.
- apiGroups: ["ballast.dev"]
  resources: ["storebackups"]
  verbs: ["create", "delete"]
# Pods are replaced, never changed.
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["get", "list", "watch", "create", "delete"]
- apiGroups: [""]
  resources: ["services", "persistentvolumeclaims"]
  verbs: ["get", "list", "watch", "create", "patch"]
- apiGroups: ["events.k8s.io"]
  resources: ["events"]
  verbs: ["create", "patch"]
{{- end }}
