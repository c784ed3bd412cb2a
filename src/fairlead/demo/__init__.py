"""The main job in three minutes: stub replicas, a real Envoy, Fairlead, and the same load under two policies."""
