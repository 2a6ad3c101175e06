"""What an operator sees: Prometheus metrics with their dashboard, and the log lines."""
