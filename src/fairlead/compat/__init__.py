"""Reads configurations, and translates those of the reference picker (EndpointPickerConfig)."""
