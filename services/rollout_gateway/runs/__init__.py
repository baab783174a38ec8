"""RunTasks: samples of tasks, and groups that agents opened themselves."""
