"""The journal on disk: taking down (event loop), writing (a thread), and the bounded directory of segments."""
