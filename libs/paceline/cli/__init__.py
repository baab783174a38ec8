"""Is the `paceline` command; services and benches are started as processes, never imported."""
