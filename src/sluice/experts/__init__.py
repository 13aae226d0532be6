"""Which experts stay in memory: cache, policies, waves, predictors. Pure: no files, threads, clocks or arithmetic."""
