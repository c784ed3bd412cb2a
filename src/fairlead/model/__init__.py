"""The nouns: what requests, endpoints, events and instructions are. Imports nothing of Fairlead but itself."""
