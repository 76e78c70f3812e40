"""The comparison with other systems: the same workload, the same verbs, one adapter per system."""
