"""What has happened in a buffer, in memory and bounded: trends, training steps, departures."""
