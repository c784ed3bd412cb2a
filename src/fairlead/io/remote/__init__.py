"""A scheduler in another process, asked over one gRPC stream."""
