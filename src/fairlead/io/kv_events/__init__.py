"""KV events over ZMQ: sockets, replay and their place in the event loop. Start at `subscriber.py`."""
