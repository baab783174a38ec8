"""RunTasks: samples of tasks, and groups that agents opened themselves.

Owns which run and what they answered.
"""
