"""What a buffer knows: entries, groups, consumers and their progress. Nothing here waits or sends."""
