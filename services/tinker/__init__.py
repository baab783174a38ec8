"""The front of the Tinker API: sessions, training clients, samplers and their futures."""
