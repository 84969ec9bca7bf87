"""One file a handler: what the consumer warps of an SM do for a row of the table."""
