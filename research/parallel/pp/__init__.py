"""Pipeline schedules as data: README.md says what they are."""
