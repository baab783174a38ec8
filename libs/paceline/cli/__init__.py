"""The `paceline` command. Imports no service: services and benches are started as processes."""
