"""What is known about the endpoints: columns, leases in flight, and which prefixes are where."""
