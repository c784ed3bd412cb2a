"""Configurations of the reference picker (EndpointPickerConfig), translated."""
