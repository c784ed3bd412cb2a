"""KV events of engines: wire format, subscriptions and replays."""
