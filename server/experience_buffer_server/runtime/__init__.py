"""What every room stands on: clocks, tasks, memory, quotas, metrics, child processes. Knows no buffer."""
