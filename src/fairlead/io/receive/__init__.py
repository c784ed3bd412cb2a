"""The ext_proc server: transports (own HTTP/2, grpc.aio) that carry the same sessions."""
