"""What wraps every RPC: statuses from errors, and metrics."""
