"""`EndpointPickerConfig`, the configuration of the reference picker (llm-d-router 0.10), read as it is.

`document` is its shape, `catalogue` says what stands for each of its plugins here, `translate` makes a policy and
settings of it, `locate` finds it inside Helm values.
"""
