"""KV events of engines: the wire format, subscriptions, replays."""
